"""The language model that ``ascend-grad demo`` trains: text, tokens, model, training, comparisons.

It alone trains without a framework, and checks every gradient against its error bound.
"""
