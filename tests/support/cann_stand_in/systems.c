/* Test double of what each system on chip has: its family by name, bfloat16, and the kernels of the operators.
 *
 * From the vendor's tables. Names of the first 910 begin like names of the 910B, but only a 910B has a digit next. */
#include "stand_in.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static bool is_one_of(const char *word, const char *words)
{
    char pattern[80], padded[160];
    snprintf(pattern, sizeof pattern, " %s ", word);
    snprintf(padded, sizeof padded, " %s ", words);
    return strstr(padded, pattern);
}

static bool begins(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

static const char *family(void)
{
    const char *soc = si_soc();
    if (is_one_of(soc, "Ascend910 Ascend910A Ascend910B Ascend910ProA Ascend910ProB Ascend910PremiumA"))
        return "910";
    if (begins(soc, "Ascend910B") && isdigit((unsigned char)soc[strlen("Ascend910B")]))
        return "910B";
    if (begins(soc, "Ascend910_93"))
        return "910_93";
    if (begins(soc, "Ascend310P"))
        return "310P";
    if (begins(soc, "Ascend310B"))
        return "310B";
    return begins(soc, "Ascend950") ? "950" : "another";
}

bool si_soc_in(const char *families) { return is_one_of(family(), families); }

static const struct {
    const char *operator, *families;
} kernels[] = {
    {"aclnnSoftmax", "910 910B 910_93 310P 310B 950"},
    {"aclnnLogSoftmax", "910 910B 910_93 310P 950"},
    {"aclnnSoftmaxBackward", "910 910B 910_93 310P 950"},
    {"aclnnLogSoftmaxBackward", "910 910B 910_93 310P 950"},
    {"aclnnScaledMaskedSoftmax", "910B 910_93 950"},
    {"aclnnScaledMaskedSoftmaxBackward", "910B 910_93 310P 950"},
    {"aclnnFusedLinearCrossEntropyLossGrad", "910B 910_93"},
    {"aclnnFusedLinearOnlineMaxSum", "910B 910_93"},
    {"aclnnFusedCrossEntropyLossWithMaxSum", "910B 910_93 950"},
    {"aclnnCrossEntropyLoss", "910B 910_93 950"},
    {"aclnnCrossEntropyLossGrad", "910B 910_93 950"},
    {"aclnnSoftmaxCrossEntropyWithLogits", "910 910B 910_93 310P 950"},
    {"aclnnCrossEntropySumExpAndIndexLogit", "950"},
    {"aclnnCast", "910 910B 910_93 310P 950"},
    {"aclnnLogSumExp", "910 910B 910_93 310P 950"},
    {"aclnnTopk", "910 910B 910_93 310P 950"},
    {"aclnnSort", "910 910B 910_93 310P 950"},
    {"aclnnGather", "910 910B 910_93 310P 950"},
    {"aclnnScatterAdd", "910B 910_93 950"},
};

int si_find_kernel(const struct operation *op)
{
    const char *operator = op->name;
    if (si_variant.kernel_code)
        return si_fail(si_variant.kernel_code, "no kernel package");
    if (op->on_every_system)
        return OK;
    if (si_variant.before_9_2 && strcmp(operator, "aclnnFusedCrossEntropyLossWithMaxSum") == 0 && si_soc_in("950"))
        return si_fail(NN_NO_KERNEL_PACKAGE, "%s has no kernel on %s before CANN 9.2", operator, si_soc());
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].operator, operator) == 0 && si_soc_in(kernels[i].families))
            return OK;
    return si_fail(NN_FIND_KERNEL, "%s has no kernel on %s", operator, si_soc());
}
