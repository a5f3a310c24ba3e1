// Add filters to the first table of a page: a field for words, and a choice for each column that has few values.
"use strict"
{
  const MOST_VALUES = 30
  const table = document.querySelector(".md-typeset table")
  const rows = [...table.tBodies[0].rows].map(row => ({ row, cells: [...row.cells].map(cell => cell.textContent.trim()) }))
  const values = at => [...new Set(rows.map(({ cells }) => cells[at]))].sort()
  const choices = [...table.tHead.rows[0].cells].map((head, at) => ({ at, name: head.textContent, values: values(at) }))
    .filter(choice => choice.values.length > 1 && choice.values.length <= MOST_VALUES)

  const form = document.createElement("form")
  form.className = "filter"
  form.innerHTML = `<label>words <input type="search"></label> ${choices.map(({ name, values }) =>
    `<label>${name} <select><option value="">all</option>${values.map(value => `<option>${value}</option>`).join("")}</select></label>`
  ).join(" ")} <output></output>`
  const [words, ...selects] = form.querySelectorAll("input, select")

  function show() {
    const wanted = words.value.toLowerCase().split(/\s+/)
    let count = 0
    for (const { row, cells } of rows) {
      const text = cells.join(" ").toLowerCase()
      row.hidden = !wanted.every(word => text.includes(word)) ||
        choices.some(({ at }, number) => selects[number].value && cells[at] !== selects[number].value)
      if (!row.hidden) count++
    }
    form.querySelector("output").textContent = `${count} of ${rows.length}`
  }
  table.dataset.cards = ""
  table.before(form)
  form.addEventListener("input", show)
  form.addEventListener("submit", event => event.preventDefault())
  show()
}
