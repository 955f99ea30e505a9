"use strict";
const byId = (id) => document.getElementById(id);

function filter() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const group of document.querySelectorAll(".group")) {
    group.hidden = group.dataset.group !== byId("group").value;
    for (const row of group.querySelectorAll(".results tr[data-panel]")) {
      const text = row.textContent.toLowerCase();
      const kind = byId("rows").value;
      const fits = kind === "all" || (kind === "ladder" ? row.dataset.ladder === "True" : row.dataset.family === kind);
      row.hidden = !fits || !words.every((word) => text.includes(word));
    }
    const empty = group.querySelector(".empty");
    if (empty) empty.hidden = Boolean(group.querySelector(".results tr[data-panel]:not([hidden])"));
  }
}

document.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-panel]");
  if (row) document.querySelector(`dialog[data-of="${CSS.escape(row.dataset.panel)}"]`).showModal();
  event.target.closest("figure")?.classList.toggle("large");
  if (event.target instanceof HTMLDialogElement) event.target.close(); // on what is dark around it
});
for (const id of ["group", "rows", "search"]) byId(id)?.addEventListener("input", filter);
if (byId("group")) filter();
