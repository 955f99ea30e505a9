"use strict";
const byId = (id) => document.getElementById(id);

function filter() {
  const [kind, words] = [byId("rows").value, byId("search").value.toLowerCase().split(/\s+/)];
  for (const group of document.querySelectorAll(".group")) group.hidden = group.dataset.group !== byId("group").value;
  for (const row of document.querySelectorAll(".results tr[data-panel]")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !row.classList.contains(kind) || !words.every((word) => text.includes(word));
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
    const [a, b] = rising ? [one, other] : [other, one];
    return isNaN(value(one)) - isNaN(value(other)) || value(a) - value(b) || text(a).localeCompare(text(b));
  };
  for (const body of heading.closest("table").tBodies) body.append(...[...body.querySelectorAll("[data-panel]")].sort(order));
}

/** An address that ends in #group or #group/figure opens that group; the app, which sends one at a time, is asked. */
function follow() {
  const place = decodeURIComponent(location.hash.slice(1));
  const [group] = place.split("/");
  if (![...byId("group").options].some(({ value }) => value === group)) return;
  byId("group").value = group;
  filter();
  if (document.querySelector(".group:not([hidden])")) byId(place)?.scrollIntoView();
  else location.search = new URLSearchParams({ group });
}

document.addEventListener("click", (event) => {
  const heading = event.target.closest("thead th");
  if (heading) sort(heading);
  const row = event.target.closest("[data-panel]");
  if (row) byId(`panel/${row.dataset.panel}`).showModal();
  event.target.closest("figure")?.classList.toggle("large");
  if (event.target instanceof HTMLDialogElement) event.target.close(); // on what is dark around it
});
for (const id of ["rows", "search"]) byId(id).addEventListener("input", filter);
byId("group").addEventListener("input", () => (location.hash = encodeURIComponent(byId("group").value)));
addEventListener("hashchange", follow);
filter();
follow();
