"""Hide secrets in errors, log lines and other text. kvfix_tools/redact.py hides secrets in settings and JSON.

`text` finds secrets by their names (a password, a token, an API key). `text` also finds secrets by their values: a URL
with a user, an Authorization header, a key in the format of a known service. In doubt, `text` hides a value.

The text may be megabytes long, and an attacker may have written the text. So no pattern may read the same characters
many times. For example, the code searches for the end of a value only once.
"""

import re

HIDDEN = "<hidden>"

#: A name that contains one of these words names a secret. The list lacks "tokens", because "tokens" names a count.
_WORDS = {
    "accountkey", "apikey", "auth", "authentication", "authorization", "bearer", "cookie", "credential", "credentials",
    "creds", "dsn", "jwt", "passcode", "passphrase", "passwd", "password", "pwd", "sas", "secret", "secrets",
    "signature", "token",
}  # fmt: skip
#: A name also names a secret if a word of the name ends with one of these texts, as in PGPASSWORD or accesstoken.
_ENDS = ("apikey", "passphrase", "passwd", "password", "secret", "token")
#: In text, "key" alone mostly means the key of a chunk. So these patterns match "key" only after a word such as "api".
_KEYS = re.compile(
    r"(?i)(?:api|access|account|private|secret|signing|ssh|ssl|tls|encryption|shared|master|license|service|client)"
    r"[-_.]?(?:access[-_.]?)?key|(?:db|user|smtp|redis|mysql|postgres|proxy|admin|root)[-_]?pass\b"
)
#: These names contain one of the words above, but name no secret: a source file, ids of tokens, a token budget.
_HARMLESS = re.compile(r"(?i)(?:\.py|token_?(?:ids?|budgets?))$")
_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")

#: (pattern of a secret that has no name, replacement)
_VALUES = (
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?s)-----BEGIN ([A-Z ]*PRIVATE KEY(?: BLOCK)?)-----.*?(?:-----END \1-----|\Z)"), HIDDEN),
    (re.compile(r"((?<![\w-])(?:-u|--user)[ \t=]+[\w.@-]+:)(?!//)[^\s\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"([?&]sig=)[\w%+/=.-]{16,}"), rf"\1{HIDDEN}"),
    # A JSON web token has at least a header and claims.
    (re.compile(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}[\w.-]*"), HIDDEN),
    # The keys of services have typical first characters.
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:"
            r"(?:hf_|api_org_|sk-|[sprw]k_(?:live|test)_|gh[pousr]_|github_pat_|gl(?:pat|dt|rt|ptt|soat|cbt|ft)-|"
            r"xox[abeoprs]-|xapp-|ya29\.|npm_|pypi-|do[opr]_v1_|SG\.|nvapi-|xai-|gsk_|pplx-|tgp_v1_|lsv2_[ps][tk]_|"
            r"hv[sbr]\.|dp\.(?:pt|st|ct|sa|scim|audit)\.|pscale_(?:tkn|pw)_|tskey-|pul-|PMAK-|NRAK-|dckr_pat_|rubygems_|sbp_|glsa_|"
            r"glc_|sntry[su]_|ATATT3|shp(?:at|ca|pa|ss)_|sq0(?:atp|csp)-|lin_api_|ntn_|AGE-SECRET-KEY-1)"
            r"[\w./+=-]{16,}|"
            r"AIza[\w-]{30,}|(?:AKIA|ASIA)[0-9A-Z]{16}|(?:dapi|r8_|key-)[0-9A-Za-z]{32,}|\d{8,10}:AA[\w-]{30,})"
        ),
        HIDDEN,
    ),
)
#: A word that may contain URLs. `_without_users` looks for a user after each "://".
_WORD = re.compile(r"[^\s\"'<>]+")
_PORT = re.compile(r"\d+[/?#]")

#: Matches a name and the next "=" or ":", in JSON, YAML, a query or a repr. A match begins at a quote or a word.
_NAMED = re.compile(
    r"(?P<name>\\{0,16}[\"'][\w.-]+\\*[\"']\]?|(?<![\w.-])(?=[\w.-]*?[A-Za-z])[\w.-]+)[ \t]*[=:]{1,2}>?[ \t]*"
)
#: Matches the name of an option or header whose value is the next word, or the next element in the repr of a list.
_OPTION = re.compile(r"(?<![\w.-])(?P<name>(?:--?|[Xx]-)[A-Za-z][\w.-]*)(?:[ \t]+(?!-)|[\"'], ?(?=[\"']))")
#: _ELEMENT matches the start of an XML element. _PAIR matches `name: NAME value:`, the form of variables in Kubernetes.
_ELEMENT = re.compile(r"<(?P<name>[A-Za-z][\w.-]*)>")
_PAIR = re.compile(r"(?i)[\"']?\bname[\"']?[=:] ?[\"']?(?P<name>[\w.-]{1,256})[\"']?,?\s{1,64}[\"']?value[\"']?[=:] ?")
_QUOTE = re.compile(r"\\*[\"']")
#: A value without quotes. A comma, ";" or "&" ends the value only before white space, `NAME=` or the end of the text. A
#: closing bracket ends the value only before white space, punctuation, a quote or the end of the text.
_PLAIN = re.compile(r"(?:[^\s\"',;&)\]}]|[,;&](?!\s|$|[\w.-]{1,64}=)|[)\]}](?![\s,;.)\]}\"']|$))+")
_LINE, _HEADER, _CONTENT = re.compile(r"[^\n]+"), re.compile(r"[^\n\"']+"), re.compile(r"[^<]+")
#: Matches the text before a name if the name is the first word of its line.
_BEGINS = re.compile(r"(?:^|\n)[ \t]*(?:- |export )?$")
#: If a value begins with one of these characters, kvfix hides the rest of the line.
_OPEN = {"[", "{", "("}
#: Headers whose values have spaces.
_HEADERS = {"authorization", "cookie"}


def is_secret(name: str, keys: bool = True) -> bool:
    """Return True if this is the name of a secret. keys: True if a name with the word "key" names a secret."""
    if _HARMLESS.search(name):
        return False
    words = {word.lower() for word in _SPLIT.split(name)}
    is_known = words & _WORDS or _KEYS.search(name) or (keys and "key" in words)
    return bool(is_known) or any(word.endswith(_ENDS) for word in words)


def text(words: str) -> str:
    if "://" in words:
        words = _WORD.sub(_without_users, words)
    for pattern, shown in _VALUES:
        words = pattern.sub(shown, words)
    for pattern in (_NAMED, _OPTION, _ELEMENT, _PAIR):
        words = _without_values(words, pattern)
    return words


def _without_users(found: re.Match[str]) -> str:
    """Hide user and password in each URL of a word, up to the last @, because a password may contain an @."""
    first, *rest = found[0].split("://")
    return "://".join([first, *map(_without_user, rest)]) if rest else found[0]


def _without_user(url: str) -> str:
    at = url.rfind("@")
    if at < 0:
        return url
    ends = [place for sign in "/?#" if (place := url.find(sign, 0, at)) >= 0]
    if ends:
        colon = url.find(":", 0, min(ends))
        if colon < 0 or _PORT.match(url, colon + 1):  # the host ends before the last @, which is in the path or query
            at = url.rfind("@", 0, min(ends))
    return f"{HIDDEN}{url[at:]}" if at >= 0 else url


def _without_values(words: str, pattern: re.Pattern[str]) -> str:
    """Hide the value after each match of `pattern` whose group `name` is the name of a secret."""
    shown: list[str] = []
    done = 0
    found = pattern.search(words)
    while found:
        begins = ends = found.end()
        name = found["name"].strip("\\\"'[]")
        if is_secret(name, keys=pattern is _OPTION) and not words.startswith(HIDDEN, begins):
            begins, ends = _value(words, found, name)
            if begins < ends:
                shown += [words[done:begins], HIDDEN]
                done = ends
        found = pattern.search(words, max(ends, found.end()))
    return "".join([*shown, words[done:]])


def _value(words: str, found: re.Match[str], name: str) -> tuple[int, int]:
    """Return the start and the end of the value, without quotes."""
    begins = found.end()
    opening = _QUOTE.match(words, begins)
    if opening:
        return opening.end(), _closing(words, opening)
    if found.re is _ELEMENT:
        pattern = _CONTENT
    elif name.rpartition("-")[2].lower() in _HEADERS:
        pattern = _HEADER
    elif words[begins : begins + 1] in _OPEN or _BEGINS.search(words, max(0, found.start() - 64), found.start()):
        pattern = _LINE
    else:
        pattern = _PLAIN
    value = pattern.match(words, begins)
    return begins, value.end() if value else begins


def _closing(words: str, opening: re.Match[str]) -> int:
    """Return where a value in quotes ends. A quote with more backslashes than `opening` is part of the value."""
    line = words.find("\n", opening.end())
    for found in _QUOTE.finditer(words, opening.end(), len(words) if line < 0 else line):
        if found[0][-1] == opening[0][-1] and len(found[0]) <= len(opening[0]):
            return found.start()
    return len(words) if line < 0 else line
