"""The version of kvfix. Recorder files contain this version."""

VERSION = "0.1.0"
