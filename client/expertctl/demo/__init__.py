"""The demo: several agents as worker processes, one private daemon, one small budget, exact tokens.

`command` is the command line, `performance` the sequence of the whole, `crew` the processes and `agent`
what runs in each of them, `events` what these two say to each other, `state` what is known so far,
`view` and `live` how it looks.
"""
