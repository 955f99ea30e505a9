"use strict";
// All that comes from people or models goes into the page by textContent: never as markup.
const byId = (id) => document.getElementById(id);
const setup = JSON.parse(byId("setup").textContent);
let asked = 0; // answers to an older question are dropped
let cards = [];

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function say(field, message) {
  byId(`${field}-error`).textContent = message;
  if (field !== "form") byId(field).setAttribute("aria-invalid", message ? "true" : "false");
}

async function request(model, question, context) {
  try {
    const reply = await fetch("/ask", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model, question, context }),
    });
    const busy = reply.status === 503 ? "The app is busy; try again in a moment." : `The server failed (${reply.status}).`;
    const body = await reply.json().catch(() => ({ message: busy }));
    return reply.ok ? body : { failed: true, field: body.field ?? "form", message: body.message };
  } catch {
    return { failed: true, field: "form", message: "The server does not answer." };
  }
}

async function ask(event) {
  event?.preventDefault();
  const turn = ++asked;
  const [question, context] = [byId("question").value, byId("context").value];
  const models = [byId("model"), byId("other")].filter((select) => select.value);
  for (const field of ["model", "context", "question", "form"]) say(field, "");
  byId("ask").disabled = true;
  byId("ask").textContent = "Asking …";
  const replies = await Promise.all(models.map((select) => request(select.value, question, context)));
  if (turn !== asked) return;
  byId("ask").disabled = false;
  byId("ask").textContent = "Ask";
  const failed = replies.find((reply) => reply.failed);
  byId("results").hidden = Boolean(failed);
  if (failed) {
    say(failed.field, failed.message);
    if (failed.field !== "form") byId(failed.field).focus();
    return;
  }
  cards = replies.map((reply, i) => card(reply, models[i].selectedOptions[0].text, context));
  byId("cards").replaceChildren(...cards.map((made) => made.node));
  fitThreshold(replies);
  decide();
}

/** A range that reaches beyond every margin, so that both answers can be had from the slider. */
function fitThreshold(replies) {
  const reach = Math.max(10, ...replies.map((reply) => Math.ceil(Math.abs(reply.margin ?? 0)) + 1));
  byId("threshold").min = -reach;
  byId("threshold").max = reach;
}

function card(reply, name, context) {
  const node = byId("card").content.cloneNode(true).firstElementChild;
  const part = (selector) => node.querySelector(selector);
  part(".name").textContent = name;
  const { tokenise, model, decode, wait } = reply.ms;
  for (const [key, spent] of Object.entries({ tokenise, model, decode })) {
    part(`.bar .${key}`).style.flexGrow = spent;
    part(".latency").append(element("span", key, `key ${key}`), ` ${spent.toFixed(1)} ms  `);
  }
  const waited = wait < 1 ? "" : ` · waited ${wait.toFixed(0)} ms`;
  const together = reply.together > 1 ? ` · answered together with ${reply.together - 1} others` : "";
  part(".latency").append(`in all ${(tokenise + model + decode).toFixed(1)} ms`);
  const cut = reply.windows > 1 ? `Cut into ${reply.windows} windows` : "One window";
  part(".windows").textContent = `${cut} of at most ${reply.window_tokens} tokens${waited}${together}`;
  for (const entry of reply.nbest) {
    const row = part(".nbest tbody").insertRow();
    const choice = element("button", entry.text || "no answer");
    choice.type = "button";
    choice.title = entry.text ? "Show its place" : "";
    choice.addEventListener("click", () => mark(part(".paragraph"), context, entry));
    row.insertCell().append(choice);
    const percent = entry.probability < 0.001 ? "< 0.1 %" : `${(100 * entry.probability).toFixed(1)} %`;
    for (const text of [entry.score.toFixed(2).replace("-", "−"), percent]) {
      const cell = row.insertCell();
      cell.className = "number";
      cell.textContent = text;
    }
  }
  return { node, reply, context };
}

/** The threshold acts on what is here already: nothing is asked again. */
function decide() {
  const threshold = Number(byId("threshold").value);
  byId("threshold-value").textContent = threshold.toFixed(1);
  for (const { node, reply, context } of cards) {
    const best = reply.nbest.find((entry) => entry.text);
    const none = !best || reply.margin > threshold;
    const by = best ? Math.abs(reply.margin - threshold).toFixed(2) : "";
    node.querySelector(".answer").textContent = none ? "No answer" : best.text;
    node.querySelector(".answer").classList.toggle("none", none);
    node.querySelector(".margin").textContent = !best
      ? "No span of this paragraph may be an answer."
      : `“No answer” scores ${Math.abs(reply.margin).toFixed(2)} ${reply.margin > 0 ? "above" : "below"} the best span: ` +
        `${by} ${none ? "over" : "under"} the threshold.`;
    mark(node.querySelector(".paragraph"), context, none ? {} : best);
  }
}

/** The paragraph with one entry's characters marked; they are counted in code points, strings here are not. */
function mark(box, context, { begin, end }) {
  const characters = Array.from(context);
  if (!end) return box.replaceChildren(context);
  const found = element("mark", characters.slice(begin, end).join(""));
  box.replaceChildren(characters.slice(0, begin).join(""), found, characters.slice(end).join(""));
  box.scrollTop = found.offsetTop - box.offsetTop - box.clientHeight / 2;
}

function offerExamples() {
  const kind = byId("model").selectedOptions[0]?.dataset.examples;
  byId("tiny").hidden = kind !== "synthetic";
  const chips = (setup.examples[kind] ?? []).map(({ name, question, context }) => {
    const chip = element("button", name);
    chip.type = "button";
    chip.addEventListener("click", () => {
      byId("question").value = question;
      byId("context").value = context;
      ask();
    });
    return chip;
  });
  byId("examples").replaceChildren(...chips);
}

byId("form").addEventListener("submit", ask);
byId("threshold").addEventListener("input", decide);
byId("model").addEventListener("change", offerExamples);
byId("context").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
});
offerExamples();
