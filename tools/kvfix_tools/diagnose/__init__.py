"""Log text to events to findings: `kvfix-diagnose`.

reader      files, folders, compressed files and streams, in blocks of whole lines
scan        blocks to hits: only lines with a literal of the grammar are looked at
merge       several files in the order of time
grammar     which lines mean something, checked against the releases' own statements (statements.json)
events      hits to events of the ledger (kvfix.ledger), the same as in the engine
usual       lines that the ledger need not hear of yet, being as they should
case        what is known so far: stories, releases, counts
findings/   one function is one finding; nothing lists them
report, page, trace, lnav   what comes out
"""
