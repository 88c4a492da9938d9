/* Test double of the libraries that CANN ships for linking on machines without it: every call answers 100039. */
#define STUB(name)                                                                                                     \
    int name(void);                                                                                                    \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return 100039;                                                                                                 \
    }
#define NOTHING(name)                                                                                                  \
    void *name(void);                                                                                                  \
    void *name(void)                                                                                                   \
    {                                                                                                                  \
        return (void *)0;                                                                                              \
    }
#define OPERATOR(name) STUB(name) STUB(name##GetWorkspaceSize)

STUB(aclInit)
STUB(aclFinalize)
STUB(aclFinalizeReference)
STUB(aclrtSetDevice)
STUB(aclrtResetDevice)
STUB(aclrtGetDevice)
STUB(aclrtGetDeviceCount)
STUB(aclrtCreateStream)
STUB(aclrtDestroyStream)
STUB(aclrtSynchronizeStream)
STUB(aclrtMalloc)
STUB(aclrtFree)
STUB(aclrtMallocHost)
STUB(aclrtFreeHost)
STUB(aclrtMemcpy)
STUB(aclrtMemcpyAsync)
STUB(aclrtMemset)
STUB(aclrtCreateContext)
STUB(aclrtDestroyContext)
STUB(aclrtSetCurrentContext)
STUB(aclrtGetCurrentContext)
STUB(aclDestroyTensor)
STUB(aclSetAclOpExecutorRepeatable)
STUB(aclDestroyAclOpExecutor)
NOTHING(aclCreateTensor)
NOTHING(aclrtGetSocName)
NOTHING(aclGetRecentErrMsg)
OPERATOR(aclnnSoftmax)
OPERATOR(aclnnLogSoftmax)
OPERATOR(aclnnScaledMaskedSoftmax)
OPERATOR(aclnnSoftmaxBackward)
OPERATOR(aclnnLogSoftmaxBackward)
OPERATOR(aclnnScaledMaskedSoftmaxBackward)
OPERATOR(aclnnFusedLinearCrossEntropyLossGrad)
OPERATOR(aclnnFusedLinearOnlineMaxSum)
OPERATOR(aclnnFusedCrossEntropyLossWithMaxSum)
