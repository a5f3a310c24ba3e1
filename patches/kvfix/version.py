"""The version of kvfix. Recorder files have it too."""

VERSION = "0.1.0"
