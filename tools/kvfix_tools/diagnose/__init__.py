"""`kvfix-diagnose`: log text becomes lines, lines become events, and rules find problems.

- `log_files`: read files, folders, compressed files and streams in blocks, and merge several files by time.
- `line_scanner`: turn blocks into lines that matter (`log_line`), and skip all other lines.
- `texts`: parse the text of one line.
- `grammar`: patterns of lines (`knowledge/messages.toml`), tested against the releases' own logging statements.
- `statements`: the logging statements and checks of the releases (`statements.json`, `checks.json`).
- `tracebacks`: assemble frames, exceptions and stacks from several lines.
- `ledger_events`: turn lines of logs into events of the ledger (`kvfix.ledger`).
- `diagnosis`: the state of the diagnosis: histories, releases, counts, findings.
- `problems`: records of known problems (`knowledge/*.toml`). `signs`: the lines that show them.
- `findings/`: functions that find problems by the numbers in lines.
- `log_finding`: a finding in this input. `advice`: its cause, and what to do.
- `report_...`: the outputs.
"""
