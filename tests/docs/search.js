// node search.js SITE: read queries from stdin (JSON), ask the search of the built site as a browser does, and print
// the pages of the results.
"use strict"
const { readFileSync } = require("node:fs")

const site = process.argv[2]
globalThis.window = globalThis
globalThis.document = { currentScript: { src: `${site}/search.js` } }
globalThis.MessageEvent ||= class extends Event {
  constructor(type, { data }) {
    super(type)
    this.data = data
  }
}
for (const file of ["search/search_index.js", "search.js"]) (0, eval)(readFileSync(`${site}/${file}`, "utf8"))

const worker = new Worker()
const results = []
worker.addEventListener("message", ({ data }) => results.push(data.data.items.map(([page]) => page.location)))
void (async () => {
  for (const query of JSON.parse(readFileSync(0, "utf8"))) await worker.postMessage({ type: 2, data: query })
  console.log(JSON.stringify(results))
})()
