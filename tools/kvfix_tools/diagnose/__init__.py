"""Log text to events to findings: `kvfix-diagnose`.

log_files        files, folders, compressed files and streams, in blocks of whole lines; several in the order of time
needles          which lines may mean something
texts            what the text of one line says
line_scanner     blocks to lines that mean something (log_line)
grammar          which lines mean something, checked against the releases' own statements (statements.json)
tracebacks       frames and exceptions, which stand on lines of their own, put together
ledger_events    lines to events of the ledger (kvfix.ledger), the same as in the engine
recorder_lines   lines of kvfix's own recorder, which are such events
diagnosis        what is known so far: histories, releases (releases), counts, findings
findings/        one function is one rule for logs; nothing lists them
log_finding      what a rule has found in this input; advice: its cause, and what to do
report_...       what comes out; timeline: what pages and traces draw
"""
