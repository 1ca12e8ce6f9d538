"""Trials: whether several ranks can compute a model, found out on a few rows before it is trusted.

A rank computes only some rows of a batch. That is right if each row of the model's output depends on that row alone,
apart from attention, which knows the plan. Two runs of the model show whether this is so:

    replaced     attention, by a function of each row of q, k and v alone (`stand_ins`)
    permuted     the rows of all arguments: the second run has other rows of the same batch in their places (`rows`)
    must follow  q, k and v of every attention, and the model's output: every place of the second run has the first
                 run's values of the row that is now in it (`record`, `compare`)

    run     rows       a model of rows      x + arange(rows)      x - mean(x)
    first   a b c d    f(a) f(b) f(c) f(d)  a+0  b+1  c+2  d+3    a-m   b-m   c-m   d-m
    second  b a b b    f(b) f(a) f(b) f(b)  b+0  a+1  b+2  b+3    b-m'  a-m'  b-m'  b-m'
                       follows              b+0 is not b+1        b-m' is not b-m

Positions counted from a rank's rows do not follow, and neither do convolutions, recurrences, sums over tokens, or
anything that depends on the longest position. The inputs and outputs of modules show which module is the first. Every
element is judged by its usual size (`sizes`): a large one, as of masked logits, hides nothing.

Meanwhile the model is protected: buffers, attributes and random generators are restored (`protect`), weights near zero,
which would hide what they multiply, have other values (`near_zero`), random numbers are all equal (`randomness`), and
products are exact (`exact`). `runs` makes the runs of a model of plain PyTorch. `modules` looks at classes before
anything runs. Ways in say only how to run a model and how to change its rows.
"""
