"""The operators: what they take, refuse and return, and the public functions.

`options` has the options of losses, `table` the operators with their checks in order, `functions` the public functions,
and `results` what they return. `ranks` has the checks that ranks make. Every backend receives calls that passed these
checks, so that a bad call fails in the same way everywhere.
"""
