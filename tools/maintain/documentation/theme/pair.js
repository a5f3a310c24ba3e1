// The page "Is my pair safe?": choose two releases and a connector, and read which bugs they have and what helps.
"use strict"
{
  const { vllm, lmcache, failed, fixes } = JSON.parse(document.getElementById("pair-data").textContent)
  const PRESENT = "FNC", SHOWN = "FN", ABSENT = "-"
  const EFFECTS = { "wrong output": "wrong output", crash: "a crash", hang: "a hang", leak: "a leak", "lost hits": "lost hits" }
  const names = [...new Set(fixes.flatMap(fix => fix.connectors))].sort()
  const page = document.getElementById("pair")

  const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/`([^`]*)`/g, "<code>$1</code>")
  const link = fix => `<a href="fixes/${fix.code.toLowerCase()}.html">${fix.code}</a>`
  const bugs = list => (list.length === 1 ? "1 bug" : `${list.length} bugs`)
  const select = (name, values) => `<label>${name} <select name="${name}">${
    values.map(value => `<option>${value}</option>`).join("")}</select></label> `
  const cell = (fix, v, l) => fix.cells[vllm.indexOf(v)][lmcache.indexOf(l)]
  const present = (list, v, l) => list.filter(fix => PRESENT.includes(cell(fix, v, l)))

  page.innerHTML = `<form>${select("vLLM", [...vllm].reverse())}${select("LMCache", [...lmcache].reverse())}${
    select("Connector", ["any", ...names])}</form><div aria-live="polite"></div>`
  const form = page.querySelector("form"), answer = page.querySelector("div")

  // Return [kind of the text, text about kvfix and the bug in this pair].
  const status = (fix, v, l) => cell(fix, v, l) === "N" || fix.applied === "never" ? ["bad", "not fixed by kvfix"]
    : fix.applied === "opt-in" ? ["warn", `fixed with <code>--plus ${fix.code}</code>`] : ["good", "fixed by kvfix"]

  function asReleased(found, v, l) {
    const counts = Object.entries(EFFECTS).map(([effect, words]) => [found.filter(fix => fix.effect === effect).length, words])
    const list = counts.filter(([count]) => count).map(([count, words]) => `${count} with ${words}`).join(", ")
    const shown = found.filter(fix => SHOWN.includes(cell(fix, v, l))).length
    return found.length
      ? ["bad", `<b>Without kvfix: no.</b> This pair has ${bugs(found)} that kvfix knows: ${list}. The lab has shown ${
        shown} of them in this pair. A hash of the released code shows the other ${found.length - shown}.`]
      : ["unknown", "<b>kvfix knows no bug of this pair.</b> The pair may still have bugs."]
  }

  function withKvfix(found, v, l) {
    const of = kind => found.filter(fix => status(fix, v, l)[0] === kind)
    const [good, warn, bad] = [of("good"), of("warn"), of("bad")]
    const verdict = bad.length ? `${bugs(bad)} left` : warn.length ? "yes, with the opt-in fixes that concern you" : "yes"
    const parts = [`<b>With kvfix: ${verdict}.</b> kvfix fixes ${good.length} of the ${bugs(found)} by default.`]
    if (bad.length) parts.push(`kvfix does not fix ${bad.map(link).join(", ")}. Their pages have workarounds.`)
    if (warn.length) parts.push(`These fixes are opt-in: ${warn.map(link).join(", ")}. Name those that concern you.`)
    return [bad.length ? "bad" : warn.length ? "warn" : "good", parts.join(" ")]
  }

  // List newer releases with the bugs that they end. Do not compare numbers of bugs: old releases were examined less.
  function upgrades(found, v, l) {
    const rows = []
    for (const [dist, name, releases, mine] of [["vllm", "vLLM", vllm, v], ["lmcache", "LMCache", lmcache, l]])
      for (const release of releases.slice(releases.indexOf(mine) + 1)) {
        const ended = found.filter(fix => fix.right[dist] === release)
        if (ended.length) rows.push(`<li>${name} ${release} ends ${ended.map(link).join(", ")}.</li>`)
      }
    const stay = present(found, vllm[vllm.length - 1], lmcache[lmcache.length - 1]).length
    return ["plain", rows.length
      ? `<b>An upgrade helps against ${new Set(rows.flatMap(row => row.match(/KVF\d+/g))).size} of the ${bugs(found)}.</b>
        <ul>${rows.join("")}</ul> The newest releases still have ${stay} of them, and new bugs of their own.`
      : "<b>No upgrade helps.</b> No newer release that kvfix knows ends one of these bugs."]
  }

  function caution(chosen, v, l) {
    const absent = chosen.filter(fix => cell(fix, v, l) === ABSENT).length
    const older = `${absent} of the ${chosen.length} known bugs are in functions that this pair does not have. Its own older
      functions were searched less. Do not choose an old release because its list is shorter.`
    return ["unknown", `<b>A short list does not mean a safe pair.</b> kvfix knows only the bugs that somebody has found, and most
      of the search was in the newest releases. ${absent ? older : ""}`]
  }

  function show() {
    const [v, l, connector] = [...form.elements].map(element => element.value)
    const chosen = fixes.filter(fix => connector === "any" || !fix.connectors.length || fix.connectors.includes(connector))
    const found = present(chosen, v, l)
    const why = failed[`${v} ${l}`]
    const parts = why ? [["unknown", `The lab could not play this pair: ${escaped(why)}`]] : []
    parts.push(asReleased(found, v, l))
    if (found.length) parts.push(withKvfix(found, v, l), upgrades(found, v, l))
    parts.push(caution(chosen, v, l))
    const row = fix => {
      const [kind, words] = status(fix, v, l)
      return `<tr><td>${link(fix)}</td><td>${fix.effect}</td><td class="pair-${kind}">${words}</td><td>${escaped(fix.title)}</td></tr>`
    }
    answer.innerHTML = `${parts.map(([kind, text]) => `<div class="pair-part pair-${kind}">${text}</div>`).join("")}
      <table data-cards><thead><tr><th>bug</th><th>effect</th><th>kvfix</th><th>what happens</th></tr></thead><tbody>${
        found.map(row).join("")}</tbody></table>`
    history.replaceState(null, "", `#${[v, l, connector].join(",")}`)
  }

  const wanted = decodeURIComponent(location.hash.slice(1)).split(",")
  for (const [at, element] of [...form.elements].entries())
    if ([...element.options].some(option => option.value === wanted[at])) element.value = wanted[at]
  form.addEventListener("change", show)
  show()
}
