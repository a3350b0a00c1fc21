"use strict";
// Everything the page shows comes from /debug/state, once a second, and goes into the document as text, never as markup.

const POLL_MS = 1000, RETRY_MS = 3000, ROWS = 100, BEAMS = 40, DENSE = 48, WINDOW_STEPS = 30, READINGS = 30;
const REASONS = ["session", "prefix", "cold", "spread", "spillover", "no_affinity", "shed", "no_replica"];
const SVG = "http://www.w3.org/2000/svg";

const $ = id => document.getElementById(id);
const steps = [];            // of /debug/state, the oldest first
const decisions = new Map(); // serial -> decision, the oldest first
const readings = new Map();  // replica id -> its engine's last counters, the oldest first
const cards = new Map();     // replica id -> its card
const arcs = new Map();      // replica id -> its place on the dial
let state = null, lastSerial = 0, common = ["", ""], selected = null, wishes = null, selectedCard = null;

// --- small parts ---

function make(name, classes = "", text = null) {
  const element = document.createElement(name);
  element.className = classes;
  if (text !== null) element.textContent = text;
  return element;
}

function draw(name, attributes, text = null) {
  const element = document.createElementNS(SVG, name);
  set(element, attributes);
  if (text !== null) element.textContent = text;
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes))
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function tinted(element, reason) {
  element.style.setProperty("--reason", `var(--${REASONS.includes(reason) ? reason : "dim"})`);
  return element;
}

/** An id without what all have in common ("app#deployment#", ":8000"), and its middle where it is still too long. */
function short(id, length) {
  const [beginning, ending] = common;
  const name = id.startsWith(beginning) && id.endsWith(ending) ? id.slice(beginning.length, id.length - ending.length) : id;
  return name.length <= length ? name : `${name.slice(0, length >> 2)}…${name.slice(1 + (length >> 2) - length)}`;
}

/** What all ids begin with, up to a separator, and the port that all end with. */
function inCommon(ids) {
  if (ids.length < 2) return ["", ""];
  let length = 0;
  while (length < ids[0].length && ids.every(id => id[length] === ids[0][length])) length++;
  const [port] = /(:\d+)?$/.exec(ids[0]);
  return [/^(.*[#/])?/s.exec(ids[0].slice(0, length))[0], ids.every(id => id.endsWith(port)) ? port : ""];
}

const percent = share => share === null ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
const seconds = s => s === null ? "–" : s < 1 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
const count = n => n < 1000 ? String(Math.round(n)) : n < 1e6 ? `${(n / 1e3).toFixed(n < 1e4 ? 1 : 0)}k` : `${(n / 1e6).toFixed(1)}M`;
const sum = (list, of) => list.reduce((total, each) => total + of(each), 0);
const strain = share => share >= 1 ? "full" : share >= 0.75 ? "busy" : "";

// --- taking in ---

async function poll() {
  let wait = POLL_MS;
  if (!document.hidden) try {
    const newest = steps.length ? steps[steps.length - 1].began_unix_s : 0;
    const answer = await fetch(`debug/state?decision=${firstOpen() - 1}&step=${newest}`, {signal: AbortSignal.timeout(10000)});
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    takeIn(await answer.json());
    show();
  } catch (error) {
    $("health").className = "bad";
    say($("health"), `the router does not answer (${error.message})`);
    wait = RETRY_MS;
  }
  setTimeout(poll, wait);
}

/** The serial from which decisions are asked for again: how the open ones end is told later. */
function firstOpen() {
  for (const [serial, decision] of decisions) if (decision.ended_s === null) return serial;
  return lastSerial + 1;
}

function takeIn(news) {
  if (state && news.last_decision < lastSerial) { // it has started anew
    decisions.clear();
    steps.length = 0;
  }
  state = news;
  common = inCommon(news.replicas.map(replica => replica.id));
  const seen = lastSerial;
  lastSerial = news.last_decision;
  for (const decision of [...news.decisions].reverse()) {
    decisions.set(decision.serial, decision);
    if (decision.serial > seen && seen) beam(decision);
  }
  for (const serial of decisions.keys()) {
    if (decisions.size <= ROWS) break;
    decisions.delete(serial);
  }
  steps.push(...news.steps);
  steps.splice(0, steps.length - 450);
  for (const replica of news.replicas) {
    const kept = readings.get(replica.id) ?? [];
    kept.push([replica.prompt_tokens_computed, replica.prompt_tokens_cached]);
    readings.set(replica.id, kept.slice(-READINGS));
  }
  const ids = new Set(news.replicas.map(replica => replica.id));
  for (const id of readings.keys()) if (!ids.has(id)) readings.delete(id);
}

/** Lately, or else since the engine's start. */
function hitRate(replica) {
  const kept = readings.get(replica.id), [computed, cached] = kept[0];
  if (replica.prompt_tokens_cached === null || cached === null) return replica.hit_rate;
  const found = replica.prompt_tokens_cached - cached, all = found + replica.prompt_tokens_computed - computed;
  return found >= 0 && all > 0 && found <= all ? found / all : replica.hit_rate;
}

/** Of some steps: by the engines' own counters, or else by what answers said; null where neither told. */
function hitRateOf(some) {
  const engines = sum(some, step => step.engine_prompt_tokens), answers = sum(some, step => step.prompt_tokens);
  if (engines) return sum(some, step => step.engine_cached_tokens) / engines;
  return answers ? sum(some, step => step.cached_tokens) / answers : null;
}

const latest = key => { for (let i = steps.length; i--;) if (steps[i][key] !== null) return steps[i][key]; return null; };

// --- showing ---

function show() {
  showRouter();
  showDial();
  showReplicas();
  showDecisions();
  showCharts();
}

function showRouter() {
  const router = state.router, unfit = state.replicas.filter(replica => replica.state !== "ready").length;
  const [mood, text] = router.membership_age_s === null ? ["", "waiting for a fleet"]
    : router.membership_stale ? ["bad", `membership feed lost ${seconds(router.membership_age_s)} ago`]
    : unfit ? ["", `${unfit} of ${state.replicas.length} replicas draining or unwell`] : ["good", "all well"];
  $("health").className = mood;
  say($("health"), text);
  say($("router"), `${router.policy} · ${router.membership_source} v${router.membership_version}`);
  const minute = steps.slice(-WINDOW_STEPS);
  totals({
    "replicas": String(state.replicas.length),
    "in flight": String(sum(state.replicas, replica => replica.in_flight + replica.others_in_flight)),
    "decisions/s": perSecond(steps.slice(-5)).toFixed(1),
    "hit rate, 1 min": percent(hitRateOf(minute)),
    "first token p50": seconds(latest("first_token_p50_s")),
    "first token p95": seconds(latest("first_token_p95_s")),
  });
  const models = [...new Set(state.replicas.flatMap(replica => replica.models))].sort();
  $("model").hidden = $("model-label").hidden = models.length < 2;
  if (models.join("\n") !== [...$("model").options].map(option => option.value).join("\n"))
    $("model").replaceChildren(...models.map(model => { const o = make("option", "", model); o.value = model; return o; }));
}

function totals(figures) {
  const list = $("totals");
  if (!list.children.length)
    for (const name of Object.keys(figures)) {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd"));
      list.append(pair);
    }
  Object.values(figures).forEach((figure, i) => say(list.children[i].lastChild, figure));
}

function perSecond(some) {
  return some.length ? sum(some, step => sum(Object.values(step.reasons), n => n)) / (2 * some.length) : 0;
}

// --- the dial ---

const LOAD = [140, 190], ARC = [126, 136], KV = [122, 92];

function sector(from, to, inner, outer) {
  const at = (radius, turn) => {
    const angle = 2 * Math.PI * (turn - 0.25);
    return `${(radius * Math.cos(angle)).toFixed(2)} ${(radius * Math.sin(angle)).toFixed(2)}`;
  };
  const wide = to - from > 0.5 ? 1 : 0;
  return `M${at(inner, from)}A${inner} ${inner} 0 ${wide} 1 ${at(inner, to)}L${at(outer, to)}` +
    `A${outer} ${outer} 0 ${wide} 0 ${at(outer, from)}Z`;
}

function showDial() {
  const dial = $("dial"), replicas = state.replicas;
  if (!dial.children.length) {
    for (const radius of [LOAD[1], KV[1]]) dial.append(draw("circle", {r: radius, class: "guide"}));
    for (const id of ["arcs", "beams", "wishes"]) dial.append(draw("g", {id}));
    dial.append(draw("text", {class: "centre", y: 6}), draw("text", {class: "centre-name", y: 26}, "in flight"));
  }
  const shares = replicas.map(replica => replica.state === "ready" ? replica.weight : 0);
  if (!sum(shares, share => share)) replicas.forEach((replica, i) => { shares[i] = replica.weight; });
  const least = sum(shares, share => share) / Math.max(1, replicas.length) / 4; // so that those outside the ring are seen
  const widths = shares.map(share => share || least), whole = sum(widths, width => width);
  const gap = replicas.length > 1 ? Math.min(0.004, 0.15 / replicas.length) : 0.0001;
  let turn = 0;
  const gone = new Set(arcs.keys());
  replicas.forEach((replica, i) => {
    const from = turn, to = (turn += widths[i] / whole) - gap;
    gone.delete(replica.id);
    let arc = arcs.get(replica.id);
    if (!arc) {
      arc = {group: draw("g", {}), title: draw("title", {}), share: draw("path", {}), load: draw("path", {}), kv: draw("path", {class: "kv"})};
      arc.group.append(arc.title, arc.share, arc.load, arc.kv);
      arc.group.addEventListener("click", () => select(replica.id));
      $("arcs").append(arc.group);
      arcs.set(replica.id, arc);
    }
    arc.turn = (from + to) / 2;
    const load = (replica.in_flight + replica.others_in_flight) / Math.max(1, state.router.saturation_in_flight);
    set(arc.share, {d: sector(from, to, ...ARC), class: `arc ${replica.state}`});
    set(arc.load, {d: sector(from, to, LOAD[0], LOAD[0] + Math.min(1, load) * (LOAD[1] - LOAD[0])), class: `load ${strain(load)}`});
    set(arc.kv, {d: sector(from, to, KV[0], KV[0] - (replica.kv_usage ?? 0) * (KV[0] - KV[1]))});
    say(arc.title, `${replica.id}, ${replica.state}: ${replica.in_flight + replica.others_in_flight} in flight`);
  });
  for (const id of gone) {
    arcs.get(id).group.remove();
    arcs.delete(id);
  }
  say(dial.querySelector(".centre"), String(sum(replicas, replica => replica.in_flight + replica.others_in_flight)));
  set(dial, {"aria-label": `A ring of ${replicas.length} replicas`});
  showWishes();
}

function spot(id, radius) {
  const angle = 2 * Math.PI * ((arcs.get(id)?.turn ?? 0) - 0.25);
  return [radius * Math.cos(angle), radius * Math.sin(angle)];
}

function beam(decision) {
  const group = $("beams");
  if (!group || !arcs.has(decision.replica) || group.children.length >= BEAMS) return;
  const [x1, y1] = spot(decision.replica, 44), [x2, y2] = spot(decision.replica, KV[1] - 2);
  const line = draw("line", {x1, y1, x2, y2, class: "beam", stroke: "var(--reason)"});
  line.addEventListener("animationend", () => line.remove());
  setTimeout(() => line.remove(), 2000);
  group.append(tinted(line, decision.reason));
}

/** Where the explained request would go: its first preferences, and the choice. */
function showWishes() {
  const group = $("wishes");
  if (!group) return;
  group.replaceChildren();
  if (!wishes) return;
  const first = wishes.preference.slice(0, 3);
  if (wishes.replica !== null && !first.includes(wishes.replica)) first.push(wishes.replica);
  for (const id of first.filter(id => arcs.has(id)).reverse()) {
    const chosen = id === wishes.replica ? " chosen" : "", place = wishes.preference.indexOf(id) + 1;
    const [x1, y1] = spot(id, 44), [x2, y2] = spot(id, KV[1] - 10);
    group.append(draw("line", {x1, y1, x2, y2, class: `wish${chosen}`}),
      draw("circle", {cx: x2, cy: y2, r: 9, class: "wish-dot"}),
      draw("text", {x: x2, y: y2, class: "wish-number"}, place ? String(place) : "•"));
  }
}

// --- replicas ---

function card() {
  const parts = {card: make("li", "replica"), id: make("b"), state: make("span"), foot: make("div", "foot"), gauges: {}};
  const top = make("div", "top");
  top.append(parts.id, parts.state);
  parts.card.append(top);
  for (const [key, name] of [["load", "in flight"], ["kv", "KV used"], ["hit", "hit rate"]]) {
    const gauge = make("div", "gauge"), bar = make("div", `bar ${key}`), figure = make("output");
    bar.append(make("i"));
    set(bar, {role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 1});
    gauge.append(make("span", "", name), bar, figure);
    parts.card.append(gauge);
    parts.gauges[key] = {bar, figure, key};
  }
  parts.card.append(parts.foot);
  return parts;
}

function fill(parts, replica, name) {
  const total = replica.in_flight + replica.others_in_flight, load = total / Math.max(1, state.router.saturation_in_flight);
  parts.card.className = `replica ${replica.state}`;
  say(parts.id, name);
  say(parts.state, replica.state);
  gauge(parts.gauges.load, Math.min(1, load), String(total), strain(load));
  gauge(parts.gauges.kv, replica.kv_usage, percent(replica.kv_usage));
  const hit = hitRate(replica);
  gauge(parts.gauges.hit, hit, percent(hit));
  const wait = replica.work_tokens / replica.pace / replica.prefill_tokens_per_s;
  const foot = [`work ${count(replica.work_tokens)}, ${seconds(wait)}`];
  if (replica.waiting !== null) foot.push(`queue ${replica.waiting}`);
  if (replica.stale) foot.push(`figures ${seconds(replica.engine_age_s)} old`);
  say(parts.foot, foot.join(" · "));
  set(parts.card, {title: [replica.id, replica.endpoint, ...replica.models, `work ${count(replica.work_tokens)} tokens`, `prefill ${count(replica.prefill_tokens_per_s)} tokens/s`].join("\n")});
}

function gauge({bar, figure, key}, share, text, mood = "") {
  bar.className = `bar ${key} ${mood}`;
  bar.firstChild.style.width = `${100 * (share ?? 0)}%`;
  set(bar, {"aria-valuenow": (share ?? 0).toFixed(3), "aria-valuetext": text});
  say(figure, text);
}

function showReplicas() {
  const wanted = $("filter").value.trim().toLowerCase(), dense = state.replicas.length > DENSE;
  $("fleet").classList.toggle("dense", dense);
  const gone = new Set(cards.keys());
  for (const replica of state.replicas) {
    gone.delete(replica.id);
    let parts = cards.get(replica.id);
    if (!parts) {
      parts = card();
      parts.card.addEventListener("click", () => select(replica.id));
      parts.card.addEventListener("keydown", event => event.key === "Enter" && select(replica.id));
      cards.set(replica.id, parts);
    }
    fill(parts, replica, short(replica.id, dense ? 8 : 26));
    parts.card.tabIndex = dense ? 0 : -1; // what a tile leaves out is shown when it is chosen
    parts.card.hidden = ![replica.id, replica.endpoint, ...replica.models].some(text => text.toLowerCase().includes(wanted));
    $("replicas").append(...(parts.card.isConnected ? [] : [parts.card]));
  }
  for (const id of gone) {
    cards.get(id).card.remove();
    cards.delete(id);
  }
  const replica = dense && state.replicas.find(each => each.id === selected);
  if (replica) {
    selectedCard ??= card();
    fill(selectedCard, replica, replica.id);
    if (!selectedCard.card.isConnected) $("selected").append(selectedCard.card);
  } else selectedCard?.card.remove();
}

function select(id) {
  selected = id === selected ? null : id;
  showReplicas();
}

// --- decisions ---

function showDecisions() {
  const minute = steps.slice(-WINDOW_STEPS), legend = $("legend");
  if (!legend.children.length)
    for (const reason of REASONS) {
      const entry = tinted(make("li", "reason", `${reason} `), reason);
      entry.append(make("b"));
      legend.append(entry);
    }
  REASONS.forEach((reason, i) => say(legend.children[i].lastChild, count(sum(minute, step => step.reasons[reason] ?? 0))));

  const list = $("decisions"), rows = new Map([...list.children].map(row => [Number(row.dataset.serial), row]));
  const fresh = [];
  for (const decision of decisions.values()) {
    let row = rows.get(decision.serial);
    rows.delete(decision.serial);
    if (!row) {
      row = decisionRow(decision);
      fresh.unshift(row);
    }
    endOf(decision, row.querySelector(".end"));
  }
  for (const row of rows.values()) row.remove();
  list.prepend(...fresh);
}

function decisionRow(decision) {
  const row = tinted(make("li"), decision.reason), when = new Date(1000 * decision.decided_unix_s);
  row.dataset.serial = decision.serial;
  const aside = decision.primary !== null && decision.replica !== null && decision.primary !== decision.replica;
  const where = decision.replica === null ? "refused"
    : aside ? `${short(decision.primary, 16)} → ${short(decision.replica, 20)}` : short(decision.replica, 36);
  const more = [
    decision.model ?? decision.api,
    decision.conversation && `${decision.conversation} by ${decision.conversation_source}`,
    decision.work_tokens !== null && `work ${count(decision.work_tokens)}`,
    `${decision.decision_us} µs`,
  ].filter(Boolean).join(" · ");
  const name = make("span", "reason", decision.reason), place = make("span", "where", where), note = make("span", "more", more);
  set(place, {title: decision.replica ?? ""});
  set(note, {title: more});
  row.append(make("span", "when", when.toTimeString().slice(0, 8)), name, place, make("span", "end"), note);
  return row;
}

function endOf(decision, cell) {
  const failed = decision.status !== null && decision.status >= 400;
  const parts = [];
  if (failed) parts.push(`status ${decision.status}`);
  if (decision.cached_tokens !== null && decision.prompt_tokens) parts.push(`hit ${percent(decision.cached_tokens / decision.prompt_tokens)}`);
  else if (decision.expected_prompt_tokens) parts.push(`hit ≈ ${percent(decision.predicted_tokens / decision.expected_prompt_tokens)}`);
  if (decision.first_token_s !== null) parts.push(seconds(decision.first_token_s));
  else if (decision.ended_s !== null && decision.replica !== null) parts.push(`ended ${seconds(decision.ended_s)}`);
  else if (decision.replica !== null) parts.push("open");
  cell.className = failed ? "end failed" : "end";
  say(cell, parts.join(" · "));
}

// --- charts: x in steps, y from 0 to 100 downwards ---

function showCharts() {
  const length = Math.max(60, steps.length), at = i => length - steps.length + i;
  const smooth = i => steps.slice(Math.max(0, i - 4), i + 1);

  const rates = steps.map(step => REASONS.map(reason => (step.reasons[reason] ?? 0) / 2));
  const highest = Math.max(1, ...rates.map(rate => sum(rate, n => n)));
  const bottoms = steps.map(() => 0);
  chart("rate", length, `last ${Math.round(length / 30)} min, up to ${highest.toFixed(highest < 10 ? 1 : 0)}`, REASONS.map((reason, r) => {
    const bars = rates.map((rate, i) => {
      if (!rate[r]) return "";
      const bottom = bottoms[i], top = bottoms[i] += rate[r];
      return `M${at(i)} ${100 - 100 * bottom / highest}V${100 - 100 * top / highest}h.9V${100 - 100 * bottom / highest}Z`;
    });
    return {d: bars.join(""), fill: `var(--${reason})`};
  }));

  const hits = steps.map((_, i) => hitRateOf(smooth(i)));
  chart("hits", length, percent(hits.at(-1) ?? null), [{d: line(hits.map(hit => hit === null ? null : 1 - hit), at), class: "first"}]);

  const p50 = steps.map(step => step.first_token_p50_s), p95 = steps.map(step => step.first_token_p95_s);
  const slowest = Math.max(0.05, ...p95.filter(s => s !== null));
  const scaled = times => line(times.map(s => s === null ? null : 1 - s / slowest), at);
  chart("ttft", length, `p50 and p95, up to ${seconds(slowest)}`, [{d: scaled(p95), class: "second"}, {d: scaled(p50), class: "first"}]);
}

function line(values, at) {
  let path = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null) return; // no gap: a quiet step is no fault
    path += `${pen}${at(i)} ${(2 + 96 * value).toFixed(2)}`;
    pen = "L";
  });
  return path;
}

function chart(id, length, text, paths) {
  const svg = $(id), caption = svg.parentElement.querySelector("b");
  if (!svg.children.length) svg.append(draw("path", {class: "grid"}), ...paths.map(() => draw("path", {})));
  set(svg, {viewBox: `0 0 ${length} 100`, preserveAspectRatio: "none", "aria-label": `${svg.previousElementSibling.firstChild.data}: ${text}`});
  set(svg.firstChild, {d: `M0 2H${length}M0 50H${length}`});
  paths.forEach((attributes, i) => set(svg.children[i + 1], attributes));
  say(caption, text);
}

// --- explanations ---

/** A request is a JSON object with a path; one without is a body; anything else is a session's id. */
function question(text) {
  const request = {method: "POST", path: "/v1/chat/completions", headers: {}};
  let value = null;
  if (text.startsWith("{")) try { value = JSON.parse(text); } catch { /* an id, then */ }
  if (value && typeof value.path === "string") return value;
  if (value) return {...request, path: "prompt" in value ? "/v1/completions" : request.path, body: value};
  if (state?.session_header) request.headers[state.session_header] = text;
  return $("model").hidden ? request : {...request, body: {model: $("model").value}};
}

async function ask(event) {
  event.preventDefault();
  const text = $("question").value.trim(), box = $("answer");
  try {
    const answer = await fetch("debug/explain", {method: "POST", body: JSON.stringify(question(text))});
    if (!answer.ok) throw new Error(await answer.text());
    wishes = await answer.json();
    box.replaceChildren(...explained(wishes));
  } catch (error) {
    wishes = null;
    box.replaceChildren(make("p", "", `No explanation: ${error.message}`));
  }
  showWishes();
}

function explained(found) {
  const head = make("p"), list = make("ol");
  head.append(tinted(make("b", "reason", found.reason), found.reason), ` → ${found.replica === null ? "refused" : short(found.replica, 40)}`);
  for (const candidate of found.candidates) {
    const entry = make("li", candidate.replica === found.replica ? "chosen" : "");
    const place = found.preference.indexOf(candidate.replica) + 1;
    entry.append(make("b", "", short(candidate.replica, 30)), make("span", "",
      `${place ? `choice ${place} · ` : ""}work ${count(candidate.work_tokens)} · ${count(candidate.uncached_tokens)} uncached · ${candidate.in_flight} in flight`));
    list.append(entry);
  }
  const by = found.conversation_source ? `Known by ${found.conversation_source}` : "No affinity";
  return [head, list, make("p", "hint", [`${by}, ${count(found.prompt_tokens)} prompt tokens.`, ...found.notes].join(" "))];
}

$("ask").addEventListener("submit", ask);
$("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !$("question").value.includes("{")) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("filter").addEventListener("input", () => state && showReplicas());
poll();
