"""`kvfix-diagnose`: the modules turn log text into lines, lines into events, and events into findings.

- `log_files`: read files, folders, compressed files and streams in blocks, and merge several files by time.
- `line_scanner`: turn blocks into lines that matter (`log_line`), and skip all other lines.
- `texts`: parse the text of a single line.
- `grammar`: patterns of lines (`knowledge/messages.toml`). Tests compare them with the releases' logging statements.
- `statements`: the logging statements and checks of the releases (`statements.json`, `checks.json`).
- `tracebacks`: assemble frames, exceptions and stacks from several lines.
- `ledger_events`: turn lines of logs into events of the ledger (`kvfix.ledger`).
- `diagnosis`: the state while the log is read, which is histories, releases, counts and findings.
- `problems`: records of known problems (`knowledge/*.toml`). `signs`: match lines with these records.
- `findings/`: functions that find problems by the numbers in log lines.
- `log_finding`: a problem that was found in this input. `advice`: the problem's cause and remedies.
- `report_...`: write the findings as text, HTML, JSON, a brief summary or a bug report.
"""
