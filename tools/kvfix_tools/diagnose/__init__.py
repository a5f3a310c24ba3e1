"""The modules of `kvfix-diagnose` turn log text into lines, lines into events, and events into findings.

- `log_files`: read files, folders, compressed files and streams in blocks, and merge several files by time.
- `line_scanner`: turn blocks into the lines that matter (`log_line`), and skip all other lines.
- `texts`: parse the text of a single line.
- `grammar`: patterns of messages (`knowledge/messages.toml`). Tests compare the patterns with the logging statements.
- `statements`: logging statements, exceptions and assertions of the releases (`statements.json`, `checks.json`).
- `tracebacks`: assemble frames, exceptions and stacks from several lines.
- `ledger_events`: turn log lines into events of the ledger (`kvfix.ledger`).
- `diagnosis`: collect request histories, releases, counts and findings while kvfix reads the log.
- `problems`: records of known problems (`knowledge/*.toml`). `signs`: match lines with the records.
- `findings/`: functions that find problems from the numbers in log lines.
- `log_finding`: a problem that kvfix found in the log. `advice`: the problem's cause and remedies.
- `report_...`: write the findings as text, HTML, JSON, a brief summary or a bug report.
"""
