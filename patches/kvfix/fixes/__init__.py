"""The fixes. Each file is about one bug. `modules` finds the files by their names, and imports no file.

For example, `fixes/lmcache/kvf001_lookup_cache_ignores_computed.py` is KVF001, lookup-cache-ignores-computed. Each
folder is for one component. `lmcache` is LMCache in the engine's process, and `lmcache_mp` is LMCache's multi-process
connectors. The other components belong to vLLM. The bugs in the folder `unfixable` have a workaround, but no fix.
"""

#: {code of a removed fix, rule or finding: why it was removed, and what to read instead}. Removed codes stay unused.
RETIRED = {
    "KVF368": "the fix worked only if both engines had it. It put data into a request id of MooncakeConnector's "
    "messages. KVF906 describes the bug and what to set"
}


def modules() -> dict[str, tuple[str, str]]:
    """Return {code: (slug, module)}, sorted by code. The modules may be source files, bytecode files, or in a zip."""
    import pkgutil  # imported only here, because most processes do not need it

    names = [each.name for each in pkgutil.walk_packages(__path__, f"{__name__}.") if ".kvf" in each.name]
    return dict(sorted((code, (slug, name)) for name in names for code, slug in [code_and_slug(name)]))


def code_and_slug(module: str) -> tuple[str, str]:
    code, _, slug = module.rpartition(".")[2].partition("_")
    return code.upper(), slug.replace("_", "-")
