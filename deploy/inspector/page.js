// The pages of `penstock inspect`. Text from a run is untrusted: it becomes text nodes and nothing else.

const FILTERS = ["outcome", "finish", "producer", "environment", "version", "reward_min", "reward_max", "lag_min", "lag_max",
  "ess_min", "ess_max", "q"];
const COLUMNS = [
  ["Update", "newest", ""], ["Index", "index", ""], ["Prompt", "", "text prompt"], ["Outcome", "", "text"], ["Reward", "reward", ""],
  ["Lag", "lag", ""], ["Tokens", "tokens", ""], ["Finish", "", "text"], ["ESS", "ess", ""], ["Max weight", "weight", "wide"],
  ["Masked", "masked", "wide"], ["Version", "version", "wide"], ["Producer", "", "text wide"],
];
const POLL_MS = 2000;
const TOKENS_AT_ONCE = 4000;
const CONTEXT_SHOWN = 600;
const VERSIONS_PER_EPOCH = 1e9;
// Characters that are invisible, or reorder the text around them: they are shown by number.
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
const $ = (id) => document.getElementById(id);

// The part of a link that is not in the filters' fields.
const link = { sort: "newest", order: "desc", page: 1, group: "", sibling: 0, mode: "lag" };
let run = null; // the last answer of /api/run
let until = null; // the list shows rows up to this number; it is part of a link, so that pages do not move
let rows = [];
let shown = null; // the group on the right
let tokens = []; // the sampled tokens on the page: { element, sibling, facts }
let asked = 0; // number of the newest request for the list; answers to older ones are dropped
let timer = 0;

// ---- text ----------------------------------------------------------------------------------------------------------

function element(name, classes = "", text = null) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== null) appendText(made, text);
  return made;
}

function appendText(parent, text, keepLines = false) {
  let start = 0;
  for (const match of text.matchAll(CONTROLS)) {
    parent.append(text.slice(start, match.index));
    const code = match[0].codePointAt(0);
    const sign = code === 10 ? "⏎" : code === 9 ? "⇥" : "U+" + code.toString(16).toUpperCase().padStart(4, "0");
    if (code !== 10 || !keepLines) parent.append(element("span", "control", sign));
    if (code === 10 || code === 9) parent.append(match[0]);
    start = match.index + match[0].length;
  }
  parent.append(text.slice(start));
}

const number = (value, digits = 3) => value === null || value === undefined ? "–" : Number.isInteger(value)
  ? value.toLocaleString("en") : Math.abs(value) >= 1e-3 || value === 0 ? value.toFixed(digits) : value.toExponential(1);
const precise = (value) => value === null ? "–" : String(Number(value.toPrecision(6)));
const range = (pair, show = number) => pair === null ? "–" : pair[0] === pair[1] ? show(pair[0]) : `${show(pair[0])}–${show(pair[1])}`;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function version(value) {
  if (value === null) return "unknown";
  const epoch = Math.floor(value / VERSIONS_PER_EPOCH);
  return epoch ? `${epoch}:${value % VERSIONS_PER_EPOCH}` : String(value);
}

function counted(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].map(([value, count]) => count > 1 ? `${value} ×${count}` : value).join(", ");
}

// ---- the link ------------------------------------------------------------------------------------------------------

const field = (name) => $("filters").elements[name];

function readLink() {
  const given = new URLSearchParams(location.search);
  for (const name of FILTERS) {
    const value = given.get(name) ?? "";
    if (field(name).tagName === "SELECT") addChoices(field(name), value ? [value] : []);
    field(name).value = value;
  }
  link.sort = given.get("sort") ?? "newest";
  link.order = given.get("order") === "asc" ? "asc" : "desc";
  link.page = Math.max(1, parseInt(given.get("page"), 10) || 1);
  const told = given.get("until");
  until = told && Number.isSafeInteger(Number(told)) ? Number(told) : null;
  link.group = given.get("group") ?? "";
  link.sibling = Math.max(0, (parseInt(given.get("sibling"), 10) || 1) - 1);
  link.mode = Object.hasOwn(MODES, given.get("mode")) ? given.get("mode") : "lag";
}

function filters() {
  const chosen = new URLSearchParams();
  for (const name of FILTERS) if (field(name).value.trim()) chosen.set(name, field(name).value.trim());
  if (link.sort !== "newest") chosen.set("sort", link.sort);
  if (link.order !== "desc") chosen.set("order", link.order);
  return chosen;
}

function writeLink(isStep) {
  const all = filters();
  if (link.page > 1) all.set("page", link.page);
  if (link.group) all.set("group", link.group);
  if (link.group && link.sibling) all.set("sibling", link.sibling + 1);
  if (link.mode !== "lag") all.set("mode", link.mode);
  // With nothing chosen the address is that of the run, which shows the newest.
  if (until !== null && all.toString()) all.set("until", until);
  const query = all.toString();
  if (location.search.slice(1) === query) return;
  history[isStep ? "pushState" : "replaceState"](null, "", query ? `/?${query}` : "/");
}

// ---- the list ------------------------------------------------------------------------------------------------------

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path);
  } catch {
    throw new Error("not reachable: is `penstock inspect` still running?");
  }
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.problem);
  return content;
}

async function loadRun() {
  run = await ask("/api/run");
  document.title = `${run.name}: rollouts`;
  $("name").replaceChildren(element("span", "value", run.name));
  $("source").textContent = `${number(run.num_groups)} groups of its record`;
  $("notes").replaceChildren(...run.notes.map((note) => element("li", "", note)));
  for (const [name, values] of Object.entries(run.facets)) addChoices(field(name), values);
}

function addChoices(select, values) {
  const there = new Set([...select.options].map((option) => option.value));
  for (const value of values) {
    if (there.has(value)) continue;
    const option = element("option", "", value);
    option.value = value;
    select.append(option);
  }
}

async function loadList() {
  const question = ++asked;
  if (until === null) showNewest();
  const query = filters();
  if (until !== null) query.set("until", until);
  $("export").href = `/api/export.jsonl?${query}`;
  query.set("page", link.page);
  try {
    let answer;
    do {
      answer = await ask(`/api/groups?${query}`);
      if (question !== asked) return;
      $("problem").hidden = true;
      showList(answer);
    } while (answer.searched < answer.to_search);
  } catch (error) {
    if (question !== asked) return;
    $("problem").replaceChildren(element("span", "", error.message));
    $("problem").hidden = false;
  }
}

function showList(answer) {
  rows = answer.rows;
  const searching = answer.searched < answer.to_search
    ? `, ${number(answer.searched)} of ${number(answer.to_search)} searched …` : "";
  $("num-found").textContent = `${number(answer.num_found)} of ${number(run.num_groups)} groups${searching}`;
  $("page").textContent = `Page ${number(link.page)} of ${number(answer.num_pages)}`;
  $("previous").disabled = link.page <= 1;
  $("next").disabled = link.page >= answer.num_pages;
  for (const button of $("columns").querySelectorAll("button")) {
    const sorted = button.dataset.sort === link.sort;
    const direction = link.order === "asc" ? "ascending" : "descending";
    button.parentElement.ariaSort = sorted ? direction : null;
    button.textContent = button.dataset.title + (sorted ? (link.order === "asc" ? " ▲" : " ▼") : "");
  }
  $("rows").replaceChildren(...rows.map(rowOf));
  markRow();
  showFresh();
}

function rowOf(row) {
  const made = element("tr");
  made.dataset.key = row.key;
  const cells = [
    number(row.update), row.index === null ? "–" : String(row.index), row.prompt_beginning || "–", row.outcome,
    row.rewards.length ? number(mean(row.rewards)) : "–", range(row.lags),
    row.num_sampled_tokens.length ? number(row.num_sampled_tokens.reduce((a, b) => a + b, 0)) : "–",
    counted(row.finish_reasons), number(row.ess_fraction), number(row.max_weight), number(row.num_masked),
    range(row.versions, version), row.producer_id,
  ];
  COLUMNS.forEach(([, , kind], n) => made.append(element("td", kind.startsWith("text") ? `${kind} value` : kind, cells[n])));
  made.firstChild.title = row.reason ? `${row.outcome}: ${row.reason}`.replace(CONTROLS, "�") : "";
  return made;
}

function markRow() {
  for (const row of $("rows").children) markCurrent(row, row.dataset.key === link.group);
}

function markCurrent(made, isCurrent, scrolls = true) {
  made.ariaCurrent = isCurrent ? "true" : null;
  if (isCurrent && scrolls) made.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function showFresh() {
  const isBehind = run.newest !== until;
  $("fresh").hidden = !isBehind;
  $("fresh").textContent = until === null || run.newest === null ? "Show what has come" : "More groups have come: show";
}

function showNewest() {
  until = run?.newest ?? null;
  writeLink(false);
}

async function refresh() {
  showNewest();
  await loadList();
}

async function turn(page) {
  link.page = page;
  writeLink(true);
  if (!location.search) until = null;
  await loadList();
}

async function filtered() {
  link.page = 1;
  until = run?.newest ?? null;
  writeLink(true);
  await loadList();
}

// ---- one group -----------------------------------------------------------------------------------------------------

async function open(key, isStep = true) {
  const isOther = key !== link.group;
  link.group = key;
  if (isOther && isStep) link.sibling = 0;
  if (isStep) writeLink(true);
  markRow();
  await loadGroup();
}

async function loadGroup() {
  const key = link.group;
  $("empty").hidden = Boolean(key);
  $("shown").hidden = !key;
  if (!key) return;
  try {
    const answer = await ask(`/api/groups/${encodeURIComponent(key)}`);
    if (key === link.group) showGroup(answer);
  } catch (error) {
    if (key === link.group) showGroup({ key, index: null, outcome: "cannot be read", problem: error.message, remark: "", reason: "" });
  }
}

function showGroup(group) {
  shown = group;
  tokens = [];
  const of = group.update ? `, update ${number(group.update)}` : "";
  $("title").replaceChildren(element("span", "value", `Group ${group.index ?? group.key}: ${group.outcome}${of}`));
  $("trouble").hidden = !group.problem;
  $("trouble").replaceChildren(element("span", "", group.problem));
  showPrompt(group);
  showFacts(group);
  const siblings = (group.rollouts ?? []).map((rollout, n) => siblingOf(group, rollout, n));
  $("siblings").replaceChildren(...siblings);
  $("colours").hidden = !siblings.length;
  $("token").replaceChildren(element("dt", "", siblings.length ? "Point at a token, or press w." : ""));
  link.sibling = Math.min(link.sibling, Math.max(0, siblings.length - 1));
  versionsShown = [...new Set(tokens.map((token) => token.facts.version))].sort((a, b) => a - b);
  colour();
  markSibling(false);
}

function showPrompt(group) {
  $("prompt").hidden = !group.prompt;
  if (!group.prompt) return;
  const messages = group.prompt.messages ?? [{ role: "prompt", content: group.prompt.text }];
  const answer = group.answer ? [{ role: "answer", content: group.answer }] : [];
  $("prompt").replaceChildren(...[...messages, ...answer].flatMap(({ role, content }) => {
    const text = element("pre", "value");
    for (const part of typeof content === "string" ? [{ text: content }] : content) {
      if (part.digest) text.append(imageOf(part.digest));
      else appendText(text, part.text, true);
    }
    return [element("h4", "value", role), text];
  }));
}

function imageOf(digest) {
  const made = element("img");
  made.src = shown.images?.[digest] ?? "";
  made.alt = made.title = `image ${digest.slice(0, 12)}`;
  return made;
}

function showFacts(group) {
  const facts = [["reason", group.reason], ["producer", group.producer_id],
    ["environment", group.task === null ? group.environment : `${group.environment}, task ${group.task}`], ["lags", group.remark],
    ["versions", group.versions ? range(group.versions, version) : ""],
    ["largest weight", number(group.max_weight)], ["masked tokens", number(group.num_masked)]];
  facts.push(...(group.missing ?? []).map((text) => ["missing", text]));
  facts.push(...Object.entries(group.metadata ?? {}).map(([name, value]) => [`metadata ${name}`, value]));
  if (group.batch) {
    const { position, policy_version, num_groups, skipped_reason, metrics } = group.batch;
    facts.push(["batch", `${position}, of ${num_groups} groups, policy ${version(policy_version)}`]);
    facts.push(["batch not trained", skipped_reason ?? ""]);
    facts.push(...Object.entries(metrics).map(([name, value]) => [`batch's ${name}`, number(value, 4)]));
  }
  if (group.timings) {
    const { claimed_s, generated_s, appended_s } = group.timings;
    facts.push(["claimed", new Date(claimed_s * 1000).toISOString().replace("T", " ")]);
    facts.push(["generated", `${precise(generated_s - claimed_s)} s later`], ["appended", `${precise(appended_s - generated_s)} s later`]);
    if (group.batch?.time_s) facts.push(["trained", `${precise(group.batch.time_s - appended_s)} s later`]);
  }
  facts.push(...Object.entries(group.sampling ?? {}).map(([name, value]) => [`sampling ${name}`, String(value)]));
  const { other = {}, ...engine } = group.fingerprint ?? {};
  facts.push(...Object.entries({ ...engine, ...other }).map(([name, value]) => [`engine ${name}`, String(value)]));
  const list = facts.filter(([, value]) => value).flatMap(([name, value]) =>
    [element("dt", "value", name), element("dd", "value", value)]);
  $("facts").querySelector("dl").replaceChildren(...list);
}

function siblingOf(group, rollout, n) {
  const made = element("article", "sibling");
  const button = element("button", "", `Sibling ${n + 1} of ${group.rollouts.length}: reward ${precise(rollout.reward)}`);
  button.type = "button";
  button.addEventListener("click", () => chooseSibling(n));
  const head = element("h3");
  head.append(button);
  const parts = Object.entries(rollout.parts).map(([name, value]) => `${name} ${precise(value)}`);
  const advantage = rollout.advantage === null ? "" : `advantage ${precise(rollout.advantage)}`;
  const last = rollout.segments.at(-1).finish_reason;
  const facts = [advantage, last, `${number(rollout.num_sampled_tokens)} tokens sampled`, ...parts];
  made.append(head, element("div", "sub value", facts.filter(Boolean).join(" · ")));
  rollout.segments.forEach((segment, s) => {
    if (rollout.segments.length > 1) {
      made.append(element("h4", "", `Segment ${s + 1} of ${rollout.segments.length}: ${segment.finish_reason}`));
    }
    made.append(tokensOf(segment, n));
  });
  return made;
}

function tokensOf(segment, sibling) {
  const made = element("div", "tokens");
  made.dir = "auto";
  const at = new Map(segment.positions.map((position, n) => [position, n]));
  const pictures = new Map(segment.images.map(([digest, start]) => [start, digest]));
  const add = (start, end) => {
    const fragment = document.createDocumentFragment();
    for (let position = start; position < end; position++) {
      if (pictures.has(position)) fragment.append(imageOf(pictures.get(position)));
      fragment.append(tokenOf(segment, position, at.get(position), sibling));
    }
    return fragment;
  };
  const hide = (start, end) => {
    const button = element("button", "more", `Show ${number(end - start)} more tokens`);
    button.type = "button";
    button.addEventListener("click", () => {
      button.replaceWith(add(start, Math.min(end, start + TOKENS_AT_ONCE)), ...(end > start + TOKENS_AT_ONCE
        ? [hide(start + TOKENS_AT_ONCE, end)] : []));
      sortTokens();
      colour();
    });
    return button;
  };
  // A long context is collapsed, and so are more tokens than a screen holds.
  const count = segment.token_ids.length;
  const first = segment.positions[0] ?? 0;
  const begin = first > CONTEXT_SHOWN ? first - CONTEXT_SHOWN / 2 : 0;
  const end = Math.min(count, begin + TOKENS_AT_ONCE);
  if (begin) made.append(hide(0, begin));
  made.append(add(begin, end));
  if (end < count) made.append(hide(end, count));
  return made;
}

function tokenOf(segment, position, n, sibling) {
  const id = segment.token_ids[position];
  const text = segment.texts ? segment.texts[position] : String(id);
  const mark = segment.marks?.[position] ?? "";
  const made = element("span", n === undefined ? "t context" : "t sampled");
  if (!segment.texts) made.classList.add("id");
  if (text) appendText(made, text);
  else made.append(element("span", "control", mark === "unknown" ? String(id) : "‥"));
  const facts = { id, text, mark, position };
  if (n !== undefined) {
    facts.version = segment.versions[n];
    facts.lag = segment.lags[n];
    facts.behavior = segment.behavior_logprobs[n];
    facts.proximal = segment.proximal_logprobs[n];
    facts.gap = facts.proximal === null ? null : facts.proximal - facts.behavior;
    facts.weight = segment.importance_weights[n];
    facts.kept = segment.kept[n];
    made.tabIndex = -1;
    tokens.push({ element: made, sibling, facts });
  }
  made.facts = facts;
  return made;
}

function sortTokens() {
  tokens.sort((a, b) => a.element.compareDocumentPosition(b.element) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1);
}

function showToken(facts) {
  const sampled = facts.version === undefined ? [["", "context"]] : [
    ["version", version(facts.version)], ["lag", facts.lag ?? "unknown"], ["behavior logprob", precise(facts.behavior)],
    ["proximal logprob", precise(facts.proximal)], ["gap", precise(facts.gap)], ["weight", precise(facts.weight)],
    ["", facts.kept === null ? "not scored" : facts.kept ? "kept" : "masked"],
  ];
  const pairs = [["token", JSON.stringify(facts.text)], ["id", facts.id], ["position", facts.position],
    [facts.mark && !/^[a-z]/.test(facts.mark) ? "bytes" : "", facts.mark], ...sampled];
  $("token").replaceChildren(...pairs.filter(([, value]) => value !== "").map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "value", String(value)));
    return pair;
  }));
}

// ---- colours -------------------------------------------------------------------------------------------------------

// A mode: [label, legend, function from a token's facts to a class].
let versionsShown = [];
// Eight colours, first plain, then with stripes in one direction and in the other.
const ofVersion = (n) => `cat-${n % 8}${["", " falling", " rising"][Math.floor(n / 8) % 3]}`;
const step = (value, bounds) => bounds.findIndex((bound) => value < bound);
const GAPS = [-1, -0.1, -0.01, 0.01, 0.1, 1, Infinity];
const WEIGHTS = [0.5, 0.9, 0.99, 1.01, 1.1, 2, Infinity];
const MODES = {
  lag: ["Lag", () => [0, 1, 2, 3, 4, 5].map((n) => [`seq-${n}`, n < 5 ? n : "5 or more"]),
    (facts) => facts.lag === null ? "none" : `seq-${Math.min(5, facts.lag)}`],
  version: ["Version", () => versionsShown.map((value, n) => [value === null ? "none" : ofVersion(n), version(value)]),
    (facts) => facts.version === null ? "none" : ofVersion(versionsShown.indexOf(facts.version))],
  gap: ["Logprob gap", () => ["below −1", "−1 to −0.1", "−0.1 to −0.01", "within ±0.01", "0.01 to 0.1", "0.1 to 1", "1 and above"]
    .map((label, n) => [`div-${n}`, label]),
    (facts) => facts.gap === null ? "none" : `div-${step(facts.gap, GAPS)}`],
  weight: ["Importance weight", () => [["no", "0: masked"], ...["below 0.5", "0.5 to 0.9", "0.9 to 0.99", "about 1", "1.01 to 1.1", "1.1 to 2", "2 and above"]
    .map((label, n) => [`div-${n}`, label])],
    (facts) => facts.weight === null ? "none" : facts.kept === false ? "no" : `div-${step(facts.weight, WEIGHTS)}`],
  mask: ["Mask", () => [["yes", "kept"], ["no", "masked"]],
    (facts) => facts.kept === null ? "none" : facts.kept ? "yes" : "no"],
};

function colour() {
  const [, legend, classOf] = MODES[link.mode];
  let hasNone = false;
  for (const { element: made, facts } of tokens) {
    const name = classOf(facts);
    hasNone ||= name === "none";
    made.className = `t sampled ${name}${shown.rollouts[0].segments[0].texts ? "" : " id"}`;
  }
  const entries = legend().slice(0, 24).filter(([name]) => name !== "none");
  if (hasNone) entries.push(["none", link.mode === "lag" || link.mode === "version" ? "unknown" : "not scored"]);
  $("legend").replaceChildren(...entries.map(([name, label]) => {
    const made = element("li");
    made.append(element("i", name), String(label));
    return made;
  }));
  for (const button of $("modes").children) {
    const isChosen = button.dataset.mode === link.mode;
    button.setAttribute("aria-checked", isChosen);
    button.tabIndex = isChosen ? 0 : -1;
  }
}

function chooseMode(mode) {
  link.mode = mode;
  writeLink(false);
  if (shown?.rollouts) colour();
}

// ---- moving --------------------------------------------------------------------------------------------------------

async function moveGroup(by) {
  const here = rows.findIndex((row) => row.key === link.group);
  let next = here < 0 ? (by > 0 ? 0 : -1) : here + by;
  if (next >= rows.length && !$("next").disabled) {
    await turn(link.page + 1);
    next = 0;
  } else if (next < 0 && here >= 0 && !$("previous").disabled) {
    await turn(link.page - 1);
    next = rows.length - 1;
  }
  if (rows[next]) await open(rows[next].key);
}

function chooseSibling(n) {
  const count = shown?.rollouts?.length ?? 0;
  if (!count) return;
  link.sibling = Math.min(count - 1, Math.max(0, n));
  writeLink(false);
  markSibling(true);
}

function markSibling(scrolls) {
  [...$("siblings").children].forEach((made, n) => markCurrent(made, n === link.sibling, scrolls || n));
}

function moveToken(by) {
  const own = tokens.filter((token) => token.sibling === link.sibling);
  const here = own.findIndex((token) => token.element === document.activeElement);
  const next = own[here < 0 ? (by > 0 ? 0 : own.length - 1) : here + by];
  next?.element.focus();
}

function moveMode(by) {
  const names = Object.keys(MODES);
  chooseMode(names[(names.indexOf(link.mode) + by + names.length) % names.length]);
}

const KEYS = {
  j: () => moveGroup(1), k: () => moveGroup(-1),
  l: () => chooseSibling(link.sibling + 1), h: () => chooseSibling(link.sibling - 1),
  ArrowRight: () => chooseSibling(link.sibling + 1), ArrowLeft: () => chooseSibling(link.sibling - 1),
  w: () => moveToken(1), b: () => moveToken(-1),
  c: () => moveMode(1), C: () => moveMode(-1),
  "/": () => field("q").focus(), r: refresh, e: () => $("export").click(), "?": () => $("help").showModal(),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.closest?.("input:not([type=checkbox]), select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = Object.hasOwn(KEYS, event.key) ? KEYS[event.key] : null;
  if (!act) return;
  event.preventDefault();
  act();
}

// ---- start ---------------------------------------------------------------------------------------------------------

async function poll() {
  try {
    await loadRun();
    $("status").textContent = "";
    if (run.newest !== until && $("follow").checked) await refresh();
    else showFresh();
  } catch (error) {
    $("status").textContent = error.message;
  }
  setTimeout(poll, POLL_MS);
}

function build() {
  $("columns").replaceChildren(...COLUMNS.map(([title, sort, kind]) => {
    const made = element("th", kind);
    made.scope = "col";
    const inner = element(sort ? "button" : "span", "", title);
    made.append(inner);
    if (!sort) return made;
    Object.assign(inner, { type: "button" });
    Object.assign(inner.dataset, { sort, title });
    inner.addEventListener("click", () => {
      link.order = link.sort === sort && link.order === "desc" ? "asc" : "desc";
      link.sort = sort;
      filtered();
    });
    return made;
  }));
  $("modes").replaceChildren(...Object.entries(MODES).map(([mode, [label]]) => {
    const button = element("button", "", label);
    button.type = "button";
    button.dataset.mode = mode;
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => chooseMode(mode));
    return button;
  }));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(filtered, 250);
  });
  $("clear").addEventListener("click", () => {
    for (const name of FILTERS) field(name).value = "";
    filtered();
  });
  $("rows").addEventListener("click", (event) => open(event.target.closest("tr").dataset.key));
  for (const kind of ["pointerover", "focusin"]) {
    $("siblings").addEventListener(kind, (event) => {
      const facts = event.target.closest(".t")?.facts;
      if (facts) showToken(facts);
    });
  }
  $("fresh").addEventListener("click", refresh);
  $("previous").addEventListener("click", () => turn(link.page - 1));
  $("next").addEventListener("click", () => turn(link.page + 1));
  $("help-button").addEventListener("click", () => $("help").showModal());
  document.addEventListener("keydown", onKey);
  addEventListener("popstate", () => {
    readLink();
    loadList();
    loadGroup();
  });
}

build();
readLink();
poll().then(() => {
  loadList();
  loadGroup();
});
