"""The fixes. Each file is about one bug. `modules` finds the files by their names, without importing them.

`fixes/lmcache/kvf001_lookup_cache_ignores_computed.py` is KVF001, lookup-cache-ignores-computed. Each folder is a
component. `lmcache` is LMCache in the engine's process, and `lmcache_mp` is LMCache's multi-process connectors. The
other components belong to vLLM. `unfixable` has bugs with a workaround instead of a fix.
"""

#: {code of a removed fix, rule or finding: why it is gone, and what to read instead}. A code is never used again.
RETIRED = {
    "KVF368": "the fix needed both engines and put data into a request id of MooncakeConnector's messages. KVF906 "
    "describes the bug and what to set"
}


def modules() -> dict[str, tuple[str, str]]:
    """Return {code: (slug, module)}, sorted by code. The modules may be source, bytecode, or in a zip."""
    import pkgutil  # imported only here: the start of a process does not need it

    names = [each.name for each in pkgutil.walk_packages(__path__, f"{__name__}.") if ".kvf" in each.name]
    return dict(sorted((code, (slug, name)) for name in names for code, slug in [code_and_slug(name)]))


def code_and_slug(module: str) -> tuple[str, str]:
    code, _, slug = module.rpartition(".")[2].partition("_")
    return code.upper(), slug.replace("_", "-")
