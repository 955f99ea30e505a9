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
    for (const body of group.querySelectorAll(".results tbody")) {
      body.hidden = !body.querySelector("tr[data-panel]:not([hidden])");
    }
    const empty = group.querySelector(".empty");
    if (empty) empty.hidden = Boolean(group.querySelector(".results tr[data-panel]:not([hidden])"));
  }
}

/** Rows by a column, within their cell: the highest first, or the other way round; what is not a number at the end. */
function sort(heading) {
  const rising = heading.getAttribute("aria-sort") === "descending";
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const text = (row) => row.cells[heading.cellIndex].textContent.trim();
  const value = (row) => {
    const [, digits, unit] = text(row).replace(/,/g, "").match(/^[+×]?([−\d.]+) ?([kM]?)/) ?? [];
    return Number(digits?.replace("−", "-")) * ({ k: 1e3, M: 1e6 }[unit] ?? 1);
  };
  const order = (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
    const difference = Number.isNaN(a) ? text(one).localeCompare(text(other)) : a - b;
    return rising ? difference : -difference;
  };
  for (const body of heading.closest("table").tBodies) body.append(...[...body.querySelectorAll("tr[data-panel]")].sort(order));
}

/** Show the chosen group; the app, which sends one at a time, is asked for it. */
function choose(hash = "") {
  const name = byId("group").value;
  if (document.querySelector(`.group[data-group="${CSS.escape(name)}"]`)) filter();
  else location.href = `?group=${encodeURIComponent(name)}${hash}`;
}

/** An address that ends in #group or #group/figure opens that group. */
function follow() {
  const place = decodeURIComponent(location.hash.slice(1));
  const [name] = place.split("/");
  if (![...byId("group").options].some((option) => option.value === name)) return;
  byId("group").value = name;
  choose(location.hash);
  byId(place)?.scrollIntoView();
}

document.addEventListener("click", (event) => {
  const heading = event.target.closest("thead th");
  if (heading) sort(heading);
  const row = event.target.closest("tr[data-panel]");
  if (row) document.querySelector(`dialog[data-of="${CSS.escape(row.dataset.panel)}"]`).showModal();
  event.target.closest("figure")?.classList.toggle("large");
  if (event.target instanceof HTMLDialogElement) event.target.close(); // on what is dark around it
});
for (const id of ["rows", "search"]) byId(id)?.addEventListener("input", filter);
byId("group")?.addEventListener("input", () => choose());
if (byId("group")) {
  filter();
  follow();
  addEventListener("hashchange", follow);
}
