"""The language model that ``ascend-grad demo`` trains: text, tokens, model, training, comparisons."""
