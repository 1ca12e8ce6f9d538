"""Trials: whether several ranks can compute a model, found out on a few rows before it is trusted.

A rank computes only some rows of a batch. That is right if each row of the model's output depends on that row alone,
apart from attention, which knows the plan. *Record and replay* shows whether this is so:

    first run    all rows; attention returns random rows, and its queries, keys and values are recorded (`record`)
    second run   some of the rows, as a rank would have them: fewer, in another order, with their positions (`rows`);
                 attention returns the same random rows as in the first run
    must follow  queries, keys and values, and the model's output: those of the same rows in the first run (`compare`)

    run     rows       a model of rows      x + arange(rows)      x - mean(x)
    first   a b c d    f(a) f(b) f(c) f(d)  a+0  b+1  c+2  d+3    a-m   b-m   c-m   d-m
    second  b a        f(b) f(a)            b+0  a+1              b-m'  a-m'
                       follows              b+0 is not b+1        b-m' is not b-m

Positions counted from a rank's rows do not follow, and neither do convolutions, recurrences, sums over tokens, or
anything that depends on the longest position or on the number of rows. The inputs and outputs of modules show which
module is the first.

Meanwhile the model is protected: buffers, attributes and random generators are restored (`protect`), weights are random
and of 32 bits, so that neither a zero nor rounding hides anything (`weights`), and random numbers are all equal
(`randomness`). `runs` makes the runs. `modules` looks at classes before anything runs. Ways in say only how to run a
model, and which of its arguments have rows.
"""
