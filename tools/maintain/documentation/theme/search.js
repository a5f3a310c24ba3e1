// This search replaces the theme's search. A reader pastes a line of a log, so the order of words counts.
//
// A page is ranked by the title, the piece of code (a message) or the text that covers the query best. The theme starts
// a Worker and shows what the worker answers. This class has the same interface, and also works from file://.
"use strict"
{
  // Messages rank before titles, and titles before text. Pages about one bug rank before other pages.
  const [CODE, TITLE, TEXT, OTHER_PAGE] = [1, 0.9, 0.5, 0.7]
  const ONE_BUG = /^(findings|fixes)\//
  // WORST: results whose score is below this part of the best score are left out.
  const [WORST, MAX_RESULTS] = [0.5, 30]
  const base = document.currentScript.src.replace(/[^/]*$/, "")

  const plain = html => html.replace(/<\/?code>/g, "").replace(/<[^>]*>/g, " ")
    .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&")
  const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;")
  const stem = word => (word.length > 4 ? word.replace(/(?:ing|ed|es|s)$/, "") : word)
  // The text that vLLM's and LMCache's loggers print before and after a message.
  const LOGGER = /^.*?(?:\[\w+\.py:\d+\]|LMCache [A-Z]+:)\s+|\s*\(\w+\.py:\d+:[\w.]+\)\s*$/g
  const words = text => (text.toLowerCase().match(/[a-z0-9_]+/g) || []).map(stem)

  function read(docs) {
    const counts = new Map()
    const sections = docs.map(doc => {
      const lines = [...doc.text.matchAll(/<code>([^]*?)<\/code>/g)].flatMap(found => plain(found[1]).split("\n"))
      const section = {
        doc,
        page: doc.location.split("#")[0],
        title: words(doc.title),
        lines: lines.map(text => ({ text, words: words(text) })).filter(line => line.words.length),
        text: new Set(words(plain(doc.text))),
      }
      for (const word of new Set([...section.title, ...section.text])) counts.set(word, (counts.get(word) || 0) + 1)
      return section
    })
    // Rare words weigh most. Numbers weigh little, because a log has other numbers than the documentation.
    const rarity = word => (/^\d+$/.test(word) ? 0.2 : 1) * Math.log(1 + docs.length / counts.get(word))
    const weights = new Map([...counts.keys()].map(word => [word, rarity(word)]))
    const articles = new Map(docs.filter(doc => !doc.location.includes("#")).map(doc => [doc.location, doc]))
    return { sections, weights, articles }
  }

  // Return the weight of the words that the query and the line have in the same order (longest common subsequence).
  function common(query, line, weight) {
    let row = new Float64Array(line.length + 1)
    for (const word of query) {
      const next = new Float64Array(line.length + 1)
      for (let at = 1; at <= line.length; at++)
        next[at] = line[at - 1] === word ? row[at - 1] + weight(word) : Math.max(row[at], next[at - 1])
      row = next
    }
    return row[line.length]
  }

  function search({ sections, weights, articles }, text) {
    const weight = word => weights.get(word) || 0
    const sum = list => list.reduce((total, word) => total + weight(word), 0)
    const query = words(text.replace(LOGGER, ""))
    // The reader may still be typing the last word, so complete it.
    const last = query[query.length - 1]
    if (last && !weights.has(last)) query.push([...weights.keys()].find(word => word.startsWith(last)) || "")
    const whole = sum(query)
    if (!whole) return []
    const covers = line => {
      const score = common(query, line, weight)
      return (score / whole) * (0.7 + (0.3 * score) / sum(line))
    }

    const asked = new Set(query)
    const best = new Map()
    let top = 0
    for (const section of sections) {
      const inText = sum(query.filter(word => section.text.has(word))) / whole
      const inTitle = section.title.some(word => asked.has(word)) ? covers(section.title) : 0
      // A line cannot cover more of the query than the whole section does. So skip the lines of a weak section.
      if (Math.max(inText, inTitle) <= WORST * top) continue
      const lines = section.lines.map(line => ({ score: CODE * covers(line.words), teaser: line.text }))
      const hit = [{ score: Math.max(TITLE * inTitle, TEXT * inText), teaser: plain(section.doc.text) }, ...lines].reduce(
        (one, other) => (other.score > one.score ? other : one))
      if (!ONE_BUG.test(section.page)) hit.score *= OTHER_PAGE
      top = Math.max(top, hit.score)
      if (hit.score > (best.get(section.page) || hit).score || !best.has(section.page))
        best.set(section.page, { ...hit, doc: section.doc })
    }
    const item = (doc, teaser, score) => {
      const marked = escaped(teaser).replace(/\w+/g, word =>
        query.includes(stem(word.toLowerCase())) ? `<mark>${word}</mark>` : word)
      return { ...doc, text: `<p>${marked}</p>`, score, terms: {} }
    }
    const ranked = [...best].sort(([, one], [, other]) => other.score - one.score)
    const good = ranked.filter(([, { score }]) => score >= WORST * ranked[0][1].score).slice(0, MAX_RESULTS)
    return good.map(([page, { doc, teaser, score }]) => {
      const article = item(articles.get(page), plain(articles.get(page).text).slice(0, 150), score)
      return page === doc.location ? [article] : [article, item(doc, teaser.slice(0, 300), score)]
    })
  }

  // The index is loaded at the first query, not with each page.
  let index
  const loaded = () => (index ||= new Promise(resolve => {
    if (typeof __index !== "undefined") return resolve(read(__index.docs))
    const script = document.createElement("script")
    script.src = `${base}search/search_index.js`
    script.onload = () => resolve(read(__index.docs))
    document.head.append(script)
  }))

  window.Worker = class extends EventTarget {
    async postMessage({ type, data }) {
      const SETUP = 0, READY = 1, RESULT = 3
      const answer = type === SETUP ? { type: READY } : { type: RESULT, data: { items: search(await loaded(), data) } }
      this.dispatchEvent(new MessageEvent("message", { data: answer }))
    }
  }
}
