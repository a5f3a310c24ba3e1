"""Codes of fixes (KVF), rules (KVR) and findings (KVD) that are gone. A retired code is never used again."""

#: {code: why it is gone, and what to read instead}
RETIRED = {
    "KVF368": (
        "the fix needed both engines and put data into a request id of MooncakeConnector's messages. KVF906 describes "
        "the bug and what to set"
    )
}
