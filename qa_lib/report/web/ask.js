"use strict";
// All that comes from people or models goes into the page by textContent: never as markup.
const byId = (id) => document.getElementById(id);
const setup = JSON.parse(byId("setup").textContent);
let asked = 0; // answers to an older question are dropped

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
  if (failed) {
    byId("results").replaceChildren();
    say(failed.field, failed.message);
    if (failed.field !== "form") byId(failed.field).focus();
    return;
  }
  byId("results").replaceChildren(...replies.map((reply, i) => card(reply, models[i].selectedOptions[0], context)));
  // Below the form, on a narrow page, nobody would see it.
  if (document.querySelector(".answer").getBoundingClientRect().bottom > innerHeight) byId("results").scrollIntoView();
}

function card(reply, option, context) {
  const node = byId("card").content.cloneNode(true).firstElementChild;
  const part = (selector) => node.querySelector(selector);
  part(".name").textContent = option.text;
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
  const seen = new Set();
  const nbest = reply.nbest.map(trimmed).filter(({ text }) => !seen.has(text) && seen.add(text));
  for (const entry of nbest) {
    const row = part(".nbest tbody").insertRow();
    const choice = element(entry.text ? "button" : "em", entry.text || "no answer");
    if (entry.text) {
      choice.type = "button";
      choice.title = "Show its place";
      choice.addEventListener("click", () => mark(part(".paragraph"), context, entry));
    }
    row.insertCell().append(choice);
    const percent = entry.probability < 0.001 ? "< 0.1 %" : `${(100 * entry.probability).toFixed(1)} %`;
    for (const text of [signed(entry.score, 2), percent]) {
      const cell = row.insertCell();
      cell.className = "number";
      cell.textContent = text;
    }
  }
  const [slider, best, own] = [part("input"), nbest.find((entry) => entry.text), Number(option.dataset.threshold)];
  slider.max = Math.max(10, Math.ceil(Math.abs(reply.margin ?? 0)) + 1); // beyond the margin: both answers can be had
  slider.min = -slider.max;
  slider.value = Number.isFinite(own) ? own : 0;
  part(".own").textContent = Number.isFinite(own)
    ? "It starts where this model’s F1 was best, on the questions that its run was scored on."
    : "It starts at 0: where this model’s F1 is best, no record says.";
  slider.addEventListener("input", () => decide(part, reply, best, context));
  part(".margin").textContent = "No span of this paragraph may be an answer.";
  decide(part, reply, best, context);
  return node;
}

/** Where the threshold stands: that acts on what is here already, and nothing is asked again. */
function decide(part, reply, best, context) {
  const threshold = Number(part("input").value);
  part("output").textContent = signed(threshold, 1);
  const none = !best || reply.margin > threshold;
  part(".answer").textContent = none ? "No answer" : best.text;
  part(".answer").classList.toggle("none", none);
  if (best) {
    const side = reply.margin > 0 ? "above" : "below";
    const by = Math.abs(reply.margin - threshold).toFixed(2);
    part(".margin").textContent =
      `“No answer” scores ${Math.abs(reply.margin).toFixed(2)} ${side} the best span: ${by} ${none ? "over" : "under"} the threshold.`;
  }
  mark(part(".paragraph"), context, none ? {} : best);
}

const signed = (value, digits) => value.toFixed(digits).replace("-", "−");

/** A span without the punctuation around it, which the scores do not count either. */
function trimmed({ text, begin, end, ...rest }) {
  const [front, back] = [/^[\s,.;:]+(?=.)/, /[\s,;:]+$/].map((around) => text.match(around)?.[0].length ?? 0);
  return { ...rest, text: text.slice(front, text.length - back), begin: begin + front, end: end && end - back };
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
  const fill = ({ question, context }) => {
    [byId("question").value, byId("context").value] = [question, context];
  };
  const chips = (setup.examples[kind] ?? []).map((example) => {
    const chip = element("button", example.name);
    chip.type = "button";
    chip.addEventListener("click", () => ask(fill(example)));
    return chip;
  });
  byId("examples").replaceChildren(...chips);
  const ours = Object.values(setup.examples).flat().some(({ context }) => context === byId("context").value);
  if (chips.length && (ours || !byId("context").value)) fill(setup.examples[kind][0]); // over nothing of the user's
}

byId("form").addEventListener("submit", ask);
byId("model").addEventListener("change", offerExamples);
byId("context").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
});
offerExamples();
