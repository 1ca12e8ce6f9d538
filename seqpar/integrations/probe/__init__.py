"""Whether a model mixes rows outside its attention: tried before it is computed on several ranks, without gradients.

A rank computes some rows of a batch. That is right where what a model makes of a row is of that row alone, but for its
attention, which knows the plan. A model is run twice to see whether it is:

    replaced     attention, by a function of each row of q, k and v alone (`stand_ins`)
    permuted     the rows of all arguments: in the second run other rows of the same lie in their places (`rows`)
    must follow  q, k and v of every attention, and what the model returns: in each place of the second run what the
                 first run made of the row that lies there (`record`, `compare`)

    run     rows       a model of rows      x + arange(rows)      x - mean(x)
    first   a b c d    f(a) f(b) f(c) f(d)  a+0  b+1  c+2  d+3    a-m   b-m   c-m   d-m
    second  b a b b    f(b) f(a) f(b) f(b)  b+0  a+1  b+2  b+3    b-m'  a-m'  b-m'  b-m'
                       follows              b+0 is not b+1        b-m' is not b-m

So positions that are counted from a rank's rows do not follow, nor convolutions, recurrences, sums over tokens, and
what depends on the longest position. What modules get and return on the way names the first that does not.

`trial` makes the runs and leaves the model as it was (`saved_state`); `calls` decides when a model is tried, and again;
`inspection` asks what classes and configs say before anything runs.
"""
