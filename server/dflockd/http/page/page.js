// The page of a lock server. It asks for what is shown once a second; text only ever becomes text.

const EVERY = 1000; // milliseconds from one answer to the next question
const SLOWEST = 5000; // ... while there are no answers
const STEP = 100; // keys shown at first, and with each "Show more"
const MOST = 500; // keys that one answer has
const FARTHEST = 10000; // keys that an answer can pass over
const LISTED = 200; // waiters that are written out
const HISTORY = 60; // points of the small curves

const $ = (id) => document.getElementById(id);
const state = { limit: STEP, offset: 0, rows: new Map(), open: new Set(), fresh: true, last: null, canRelease: false };
const curves = { holds: [], waiters: [], grants: [] };
const calm = matchMedia("(prefers-reduced-motion: reduce)");

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// What cannot be seen, or turns the text around it, is written as a number.
function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// As a program on another host can say it: a server that listens everywhere does not say where.
function reached(address) {
  const host = location.hostname;
  return address.replace(/^(0\.0\.0\.0|\[::\])(?=:)/, host.includes(":") ? `[${host.replace(/[[\]]/g, "")}]` : host);
}

const number = (value) => value.toLocaleString("en");

function span(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  const two = (n) => String(n).padStart(2, "0");
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)} m`;
  return `${Math.floor(s / 86400)} d ${two(Math.floor(s / 3600) % 24)} h`;
}

// Who: "task[id] host pid 1" is what tasks are labelled with; anything else is shown as it is.

const LABEL = /^([^\s[\]]+)(?:\[([^\]]+)\])? (?:(.+) )?(\S+) pid (\d+)$/;

function who(holder) {
  const label = visible(holder.label);
  const found = LABEL.exec(label);
  if (!found) return { name: label || connection(holder), rest: label ? connection(holder) : "" };
  const [, name, id, does, host, pid] = found;
  return { name, id, rest: [does, host, `pid ${pid}`].filter(Boolean).join(" · ") };
}

function run(one) {
  return one.owner ? `run ${one.owner.slice(0, 8)} · attempt ${one.attempt}` : "";
}

// What else there is to say of who holds a key or waits for it: its group, or who supersedes it.
function details(one) {
  return (one.details || []).map(visible);
}

function turn(waiter) {
  if (waiter.told) return "told of its turn";
  return waiter.away ? "comes back" : "";
}

function connection(one) {
  if (one.connection === undefined) return "";
  if (one.connection) return `connection ${one.connection}`;
  return one.detached ? "left to its lease" : "not connected now";
}

// Questions.

class Refused extends Error {}

async function ask(path, parameters = {}, options = {}) {
  const query = new URLSearchParams(parameters).toString();
  const answer = await fetch(query ? `${path}?${query}` : path, {
    ...options,
    cache: "no-store",
    signal: AbortSignal.timeout(10000),
  });
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => ({}));
  throw new Refused(said.error || `${answer.status} ${answer.statusText}`);
}

let pause = EVERY;
let timer = 0;
let asking = false;
let again = false;

async function refresh() {
  clearTimeout(timer);
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  try {
    const wanted = { search: $("search").value.trim(), sort: $("sort").value, limit: state.limit, offset: state.offset };
    if ($("all").checked) wanted.all = 1;
    const opening = [...state.open].map((id) => named(id)).map(([space, key]) =>
      ask("api/lock", { space, key }).catch((error) => {
        if (error instanceof Refused) return null; // its shard has moved: the list will not have it
        throw error;
      }));
    const [stats, locks, ...opened] = await Promise.all([ask("api/stats"), ask("api/locks", wanted), ...opening]);
    const now = performance.now();
    showStats(stats);
    showLocks(locks, now, wanted.search);
    for (const detail of opened) if (detail) showDetail(detail, now);
    if (stats.cluster) await showShards();
    $("shards").hidden = !stats.cluster;
    $("notice").hidden = true;
    stale(false);
    pause = EVERY;
  } catch (error) {
    const why = error instanceof Refused ? `The server says: ${error.message}.` : "The server does not answer.";
    say($("notice"), `${why} What is shown is from ${state.seen || "never"}; trying again.`);
    $("notice").hidden = false;
    stale(true);
    showState("away", "no answer");
    pause = Math.min(SLOWEST, pause * 2);
  } finally {
    asking = false;
  }
  // A page that nobody looks at asks nothing.
  if (!document.hidden) timer = setTimeout(refresh, again ? 0 : pause);
  again = false;
}

function stale(is) {
  for (const id of ["locks", "totals", "shards"]) $(id).classList.toggle("stale", is);
}

// The server.

function showState(what, text) {
  $("state").dataset.state = what;
  say($("state").lastElementChild, text);
}

function showStats(stats) {
  state.seen = new Date().toLocaleTimeString();
  state.canRelease = stats.can_release;
  const bad = stats.checks.filter((check) => !check.ok);
  const told = bad.map((check) => `${check.name.replaceAll("_", " ").replace(/^not /, "")}: ${check.reason}`).join("; ");
  // Not everything that is looked at has to be so for a server to be ready.
  const does = stats.status === "serving" ? "granting locks" : `no grants yet, ${stats.status}`;
  if (!stats.ready) showState("not-ready", told);
  else showState("ready", bad.length ? `${does}; ${told}` : does);
  const address = stats.cluster?.address || stats.addresses[0] || "";
  say($("where"), address);
  say($("start").lastElementChild, `from dflockd.sync_client import DistributedLock\nwith DistributedLock("hello", servers=[${JSON.stringify(reached(address))}], label="me"):\n    input("It is held, and on the page. Enter gives it back. ")`);
  say($("version"), `dflockd ${stats.version}, up ${span(stats.uptime_s)}`);
  say($("holds"), number(stats.holds));
  say($("waiters"), number(stats.waiters));
  say($("keys"), number(stats.keys));
  say($("max-keys"), `of at most ${number(stats.max_keys)}`);
  say($("connections"), number(stats.connections));
  say($("expired"), number(stats.totals.expired));
  const circles = stats.blocking?.circles || [];
  $("circles").hidden = !circles.length;
  if (circles.length !== $("circles").children.length || circles.some((text, i) => $("circles").children[i].title !== text)) {
    $("circles").replaceChildren(...circles.map((text) => make("li", { title: text }, `Deadlock, which only a timeout or the end of a lease resolves: ${visible(text)}`)));
  }
  document.title = `${stats.holds} held, ${stats.waiters} waiting · dflockd`;

  const last = state.last;
  const passed = last ? stats.uptime_s - last.uptime_s : 0;
  if (passed > 0) {
    const rate = Math.max(0, stats.totals.grants - last.totals.grants) / passed;
    say($("grants"), rate >= 100 ? number(Math.round(rate)) : rate.toFixed(1));
    draw("grants", rate);
  }
  draw("holds", stats.holds);
  draw("waiters", stats.waiters);
  state.last = stats;
}

function draw(name, value) {
  const points = curves[name];
  points.push(value);
  if (points.length > HISTORY) points.shift();
  const top = Math.max(...points, 1);
  const start = HISTORY - points.length;
  if (points.length < 5) return;
  const line = $(name).parentElement.querySelector("polyline");
  line.setAttribute("points", points.map((v, i) => `${start + i},${(15 - 14 * v / top).toFixed(1)}`).join(" "));
}

// Keys.

const idOf = (lock) => `${lock.space} ${lock.key}`;

function named(id) {
  const blank = id.indexOf(" ");
  return [id.slice(0, blank), id.slice(blank + 1)];
}

function showLocks(answer, now, search) {
  const body = $("locks").tBodies[0];
  const seen = new Set();
  let before = null;
  for (const lock of answer.locks) {
    const id = idOf(lock);
    seen.add(id);
    const row = state.rows.get(id) || newRow(id, lock);
    fill(row, lock, now);
    const expected = before ? before.nextElementSibling : body.firstElementChild;
    if (expected !== row.line) body.insertBefore(row.line, expected);
    before = row.line;
    if (row.detail) {
      if (before.nextElementSibling !== row.detail) before.after(row.detail);
      before = row.detail;
    }
  }
  for (const [id, row] of state.rows) {
    if (!seen.has(id)) leave(id, row);
  }
  state.fresh = false;
  const shown = answer.locks.length;
  $("locks").hidden = !state.rows.size;
  $("empty").hidden = Boolean(state.rows.size);
  const nobody = search ? `Nobody holds or waits for anything with “${search}” in it.` : "Nothing is held, and nobody waits.";
  say($("empty").firstElementChild, nobody);
  $("start").hidden = Boolean(search);
  const all = answer.matched;
  const range = state.offset ? `${number(state.offset + 1)} to ${number(state.offset + shown)}` : number(shown);
  say($("count"), shown < all ? `${range} of ${number(all)} keys` : `${number(all)} ${all === 1 ? "key" : "keys"}`);
  const rest = all - state.offset - shown;
  $("pager").hidden = !state.offset && rest <= 0;
  $("more").hidden = rest <= 0 || state.limit >= MOST || Boolean(state.offset);
  $("previous").hidden = !state.offset;
  $("next").hidden = rest <= 0 || state.limit < MOST || state.offset + MOST > FARTHEST;
  $("all-label").hidden = !answer.notes && !$("all").checked;
  say($("all-label").lastElementChild, $("all").checked ? "with notes" : `${number(answer.notes)} notes`);
  // Somebody has released what was shown here.
  if (!shown && state.offset && all) turnTo(0);
}

function turnTo(offset) {
  state.offset = Math.max(0, Math.min(FARTHEST, offset));
  state.limit = state.offset ? MOST : state.limit;
  clear();
  refresh();
  scrollTo({ top: 0 });
}

// Who was searched for, where it is not the one who has held the key longest.
function found(lock) {
  const { match } = lock;
  if (!match || (!match.position && lock.holder?.fence === match.fence)) return "";
  const { name, id } = who(match);
  const others = lock.matches > 1 ? `, and ${number(lock.matches - 1)} more` : "";
  const where = match.position
    ? `waits ${match.position} of ${number(lock.waiters)}, for ${span(match.waited_s)}${forecast(lock.pace_s, match.position)}`
    : `holds it too, for ${span(match.held_s)}`;
  return `${name}${id ? ` ${id.slice(0, 8)}` : ""} ${where}${others}`;
}

function forecast(pace, position) {
  return typeof pace === "number" ? `, about ${span(pace * position)} yet` : "";
}

function newRow(id, lock) {
  const mark = state.fresh ? "" : " new"; // in a list that is new as a whole, no key is news
  const row = { id, ends: 0, lease: 0, fence: "" };
  row.toggle = make("button", { type: "button", class: "toggle", "aria-expanded": "false" }, make("code", {}, visible(lock.key)));
  row.chip = make("span", { class: "chip", hidden: "" });
  row.toggle.append(row.chip);
  row.name = make("b");
  row.rest = make("small");
  row.found = make("small", { class: "found", hidden: "" });
  row.age = make("span");
  row.bar = make("i");
  row.left = make("span");
  row.meter = make("div", { class: "lease" }, make("div", { "aria-hidden": "true" }, row.bar), row.left);
  row.waiting = make("span", { class: "waiting" });
  row.oldest = make("span", { class: "oldest" });
  const cell = (attributes, ...children) => make("td", { role: "cell", ...attributes }, ...children);
  row.line = make("tr", { class: `key${mark}`, role: "row" },
    cell({}, row.toggle), cell({ class: "who" }, row.name, row.rest, row.found),
    cell({ class: "number" }, row.age), cell({}, row.meter), cell({ class: "number" }, row.waiting), cell({ class: "number" }, row.oldest));
  row.line.addEventListener("click", () => {
    if (!getSelection().toString()) flip(row);
  });
  settle(row, "new");
  row.line.row = row;
  watcher.observe(row.line);
  state.rows.set(id, row);
  if (state.open.has(id)) flip(row, true);
  return row;
}

function settle(row, mark) {
  setTimeout(() => row.line.classList.remove(mark), 900);
}

function fill(row, lock, now) {
  row.line.classList.remove("gone");
  const holder = lock.holder;
  const others = lock.holders - 1;
  if (holder) {
    const { name, id, rest } = who(holder);
    const more = others > 0 ? `and ${others} more, longest: ` : "";
    say(row.name, name);
    row.name.title = visible(holder.label);
    row.rest.replaceChildren(more, ...(id ? [make("span", { class: "mono", title: id }, id.slice(0, 8)), ` · ${rest}`] : [rest]));
    if (row.fence && row.fence !== holder.fence) {
      row.line.classList.add("changed");
      settle(row, "changed");
    }
    row.since = now - holder.held_s * 1000;
    drain(row, holder, now);
    row.fence = holder.fence;
  } else {
    say(row.name, "nobody yet");
    row.rest.replaceChildren(lock.told ? "somebody was told of the turn" : lock.paused ? "it is paused" : "nothing is granted now");
    row.since = 0;
    row.ends = 0;
    still(row);
  }
  row.meter.hidden = !holder;
  const many = lock.limit !== 1;
  row.chip.hidden = !many && !lock.rate && !lock.paused;
  const slots = lock.limit ? `${lock.used ?? lock.holders} of ${lock.limit}` : String(lock.holders);
  say(row.chip, [lock.paused ? "paused" : "", many ? slots : "", placesOf(lock.rate)].filter(Boolean).join(", "));
  say(row.waiting, number(lock.waiters));
  row.waiting.toggleAttribute("data-none", !lock.waiters);
  row.waitsSince = typeof lock.oldest_wait_s === "number" ? now - lock.oldest_wait_s * 1000 : 0;
  const text = found(lock);
  row.found.hidden = !text;
  say(row.found, text);
  tick(row, now);
}

// How soon another run may begin, of a key whose runs may not begin at any time.
function placesOf(rate) {
  if (!rate) return "";
  if (rate.free) return `rate: ${rate.free} of ${rate.runs} free`;
  return rate.next_s === null ? "rate: next when one begins" : `rate: next in ${span(rate.next_s)}`;
}

function drain(row, holder, now) {
  const ends = now + holder.lease_left_s * 1000;
  // The same deadline, seen again through the network's jitter, is no renewal.
  if (Math.abs(ends - row.ends) < 250 && row.lease === holder.lease_s) return;
  const refilled = row.ends && ends > row.ends;
  row.ends = ends;
  row.lease = holder.lease_s;
  if (row.visible) animate(row, now, refilled ? 350 : 0);
}

// Let the bar drain from what is left now; after a renewal it first fills up, in so many milliseconds.
function animate(row, now, filling = 0) {
  const left = Math.max(0, row.ends - now);
  const share = Math.min(1, left / 1000 / (row.lease || 1));
  const from = filling && !calm.matches ? getComputedStyle(row.bar).transform : "";
  still(row);
  row.bar.style.transform = `scaleX(${share})`;
  if (calm.matches) return;
  if (from) row.bar.animate([{ transform: from }, { transform: `scaleX(${share})` }], { duration: filling, easing: "ease-out" });
  row.bar.animate([{ transform: `scaleX(${share})` }, { transform: "scaleX(0)" }],
    { delay: filling, duration: Math.max(0, left - filling), fill: "forwards" });
}

function still(row) {
  row.bar.getAnimations().forEach((animation) => animation.cancel());
}

// Only what can be seen moves: hundreds of bars at once would keep a browser busy.
const watcher = new IntersectionObserver((entries) => {
  const now = performance.now();
  for (const { target, isIntersecting } of entries) {
    const row = target.row;
    row.visible = isIntersecting;
    if (!isIntersecting) still(row);
    else if (row.ends) {
      animate(row, now);
      tick(row, now);
    }
  }
});

function tick(row, now) {
  if (!row.visible) return;
  say(row.oldest, row.waitsSince ? span((now - row.waitsSince) / 1000) : "");
  if (!row.since) {
    say(row.age, "");
    return;
  }
  say(row.age, span((now - row.since) / 1000));
  const left = Math.max(0, row.ends - now) / 1000;
  const share = left / (row.lease || 1);
  const level = share > 0.35 ? "good" : share > 0.15 ? "fair" : "poor";
  if (row.meter.dataset.level !== level) row.meter.dataset.level = level;
  say(row.left, left < 10 ? `${left.toFixed(1)} s` : span(left));
  if (calm.matches) row.bar.style.transform = `scaleX(${Math.min(1, share)})`;
}

function remove(row) {
  watcher.unobserve(row.line);
  row.line.remove();
  row.detail?.remove();
}

function leave(id, row) {
  if (row.line.classList.contains("gone")) {
    remove(row);
    state.rows.delete(id);
    state.open.delete(id);
  } else {
    // For one more round: an end is worth seeing, too.
    row.line.classList.add("gone");
  }
}

// One key, opened.

function flip(row, open = !row.detail) {
  row.toggle.setAttribute("aria-expanded", String(open));
  if (open && !row.detail) {
    state.open.add(row.id);
    row.holders = make("ul", { "aria-label": "Holders" });
    row.waiters = make("ol", { tabindex: "0", "aria-label": "Waiting, in order" });
    row.queue = make("h2");
    row.pause = make("p", { class: "pause", hidden: "" }, make("span"), " ");
    row.inside = make("div", { class: "columns" },
      make("div", {}, make("h2", {}, "Held by"), row.holders), make("div", {}, row.queue, row.waiters));
    row.detail = make("tr", { class: "detail", role: "row" }, make("td", { colspan: "6", role: "cell" }, row.pause, row.inside));
    row.line.after(row.detail);
    refresh();
  } else if (!open && row.detail) {
    state.open.delete(row.id);
    row.detail.remove();
    row.detail = null;
  }
}

function showDetail(detail, now) {
  const row = state.rows.get(idOf(detail));
  if (!row?.detail) return;
  const queue = detail.waiters.length + detail.omitted_waiters;
  const pace = typeof detail.pace_s === "number" ? `, one about every ${span(Math.max(1, detail.pace_s))}` : "";
  showPause(row, detail);
  const order = detail.waiters.some((waiter) => waiter.group) ? "groups take turns" : "first come, first served";
  say(row.queue, queue ? `Waiting, ${order}: ${number(queue)}${pace}` : "Nobody waits");
  const shown = detail.waiters.slice(0, LISTED);
  same(row.waiters, shown.length + (queue > shown.length ? 1 : 0), "place", "what", "since");
  shown.forEach((waiter, i) => {
    const [place, what, since] = row.waiters.children[i].children;
    say(place, number(i + 1));
    describe(what, waiter, turn(waiter));
    say(since, span(waiter.waited_s));
  });
  if (queue > shown.length) {
    const [place, what, since] = row.waiters.lastElementChild.children;
    say(place, "…");
    describe(what, { label: `and ${number(queue - shown.length)} more` });
    say(since, "");
  }
  same(row.holders, detail.holders.length, "what", "since");
  detail.holders.forEach((holder, i) => {
    const line = row.holders.children[i];
    const [what, since] = line.children;
    describe(what, holder, `fence ${holder.fence}`);
    say(since, span(holder.held_s));
    let button = line.querySelector("button");
    if (state.canRelease && !button) {
      button = make("button", { type: "button" }, "Release…");
      button.addEventListener("click", () => offer(button.detail, button.holder));
      line.append(button);
    }
    if (button) Object.assign(button, { detail, holder });
  });
}

// Whether a key is paused, and the button for that.
function showPause(row, detail) {
  const { paused } = detail;
  const may = state.canRelease && detail.space === "lock";
  say(row.pause.firstElementChild, paused ? pauseOf(paused) : "");
  row.pause.hidden = !paused && !may;
  let button = row.pause.querySelector("button");
  if (may && !button) {
    button = make("button", { type: "button" });
    button.addEventListener("click", () => (button.paused ? resume(detail.key) : offerPause(detail.key)));
    row.pause.append(button);
  }
  if (!button) return;
  button.hidden = !may;
  button.paused = Boolean(paused);
  say(button, paused ? "Resume" : "Pause…");
}

function pauseOf({ by, reason, paused_s: age, left_s: left }) {
  const yet = left === null ? "" : `, ${span(left)} left`;
  return `Paused${by ? ` by ${visible(by)}` : ""} for ${span(age)}${yet}${reason ? `: ${visible(reason)}` : ""}`;
}

let pausing = "";

function offerPause(key) {
  pausing = key;
  say($("pause-key"), visible(key));
  $("pausing").showModal();
}

async function pauseKey() {
  $("pausing").close();
  const wanted = { key: pausing, reason: $("pause-reason").value.trim() };
  const minutes = $("pause-minutes").value.trim();
  if (minutes) wanted.for = Math.max(1, Math.round(Number(minutes) * 60));
  await change("POST", wanted, "is paused: who holds it goes on, and nobody new begins", "is not paused");
}

async function resume(key) {
  await change("DELETE", { key }, "is resumed", "is not resumed");
}

async function change(method, wanted, done, failed) {
  try {
    await ask("api/pause", wanted, { method });
    report(`${visible(wanted.key)} ${done}.`);
  } catch (error) {
    report(`${visible(wanted.key)} ${failed}: ${error.message}.`, "bad");
  }
  refresh();
}

function same(list, length, ...parts) {
  while (list.children.length > length) list.lastElementChild.remove();
  while (list.children.length < length) list.append(make("li", {}, ...parts.map((part) => make("span", { class: part }))));
}

function describe(element, one, more = "") {
  if (!element.firstChild) element.append(make("b"), make("small"), " ", make("small", { class: "mono" }), " ", make("small"));
  const [name, rest, id, last] = element.children;
  const told = who(one);
  say(name, told.name);
  say(rest, told.rest);
  say(id, told.id || "");
  say(last, [run(one), ...details(one), more].filter(Boolean).join(" · "));
}

let offered = null;

function offer(detail, holder) {
  offered = { space: detail.space, key: detail.key, fence: holder.fence };
  const told = who(holder);
  const next = detail.waiters[0];
  say($("confirm-key"), visible(detail.key));
  say($("confirm-who"), told.name);
  say($("confirm-id"), told.id || "it has said none");
  say($("confirm-where"), told.rest || "not known");
  say($("confirm-age"), span(holder.held_s));
  say($("confirm-next"), next ? whole(next) : "nobody waits");
  say($("confirm-text"), `${who(holder).name} is not stopped by this: it finds out when it next renews, and until then somebody else may run beside it.`);
  $("confirm").showModal();
}

function whole(one) {
  const { name, id, rest } = who(one);
  return [name, id, rest].filter(Boolean).join(" · ");
}

async function release() {
  $("confirm").close();
  const { space, key } = offered;
  $("done").hidden = true;
  try {
    await ask("api/lock", offered, { method: "DELETE" });
    const now = await ask("api/lock", { space, key });
    const holder = now.holders.at(-1);
    const text = holder ? `next: ${whole(holder)}` : now.waiters.length ? "the next has not taken it yet" : "nobody waits for it";
    report(`${visible(key)} is released; ${text}.`);
  } catch (error) {
    report(`${visible(key)} is not released: ${error.message}.`, "bad");
  }
  refresh();
}

let told = 0;

function report(text, how = "good") {
  clearTimeout(told);
  $("done").dataset.how = how;
  $("done").hidden = false;
  say($("done"), text);
  told = setTimeout(() => { $("done").hidden = true; }, 15000);
}

// The cluster.

const HUES = [164, 212, 36, 272, 14, 88, 190, 330];
let mapped = -Infinity;

async function showShards() {
  if (performance.now() - mapped < 5000) return;
  const { num_shards: all, servers, shards } = await ask("api/shards");
  mapped = performance.now();
  const dark = getComputedStyle(document.body).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const colour = (i) => (i < 0 ? (dark ? "#3a424a" : "#d5d7d0") : `hsl(${HUES[i % HUES.length]} ${i < HUES.length ? 36 : 18}% ${dark ? 56 : 50}%)`);
  const wide = 256;
  const map = $("map");
  map.width = wide;
  map.height = Math.ceil(all / wide);
  const context = map.getContext("2d");
  const owned = new Map(servers.map((_, owner) => [owner, 0]));
  shards.forEach((owner, shard) => {
    context.fillStyle = colour(owner);
    context.fillRect(shard % wide, Math.floor(shard / wide), 1, 1);
    owned.set(owner, (owned.get(owner) || 0) + 1);
  });
  const under = Object.entries(state.last.cluster.shards).filter(([stage]) => stage !== "serving");
  const way = under.map(([stage, count]) => `; this one is ${stage} ${number(count)}`).join("");
  say($("shards-text"), `${number(all)} on ${servers.length} ${servers.length === 1 ? "server" : "servers"}${way}`);
  const painted = (tag, owner) => {
    const element = make(tag, { "aria-hidden": "true" });
    element.style.background = colour(owner);
    return element;
  };
  const owners = [...owned].sort(([a], [b]) => a - b);
  $("shares").replaceChildren(...owners.map(([owner, count]) => {
    const share = painted("i", owner);
    share.style.flexGrow = count;
    return share;
  }));
  $("owners").replaceChildren(...owners.map(([owner, count]) => {
    const here = servers[owner] === state.last.cluster.address ? make("small", {}, " this server") : "";
    return make("li", {}, painted("i", owner), make("code", {}, owner < 0 ? "nobody yet" : servers[owner]), ` ${number(count)}`, here);
  }));
}

// The reader.

const THEMES = ["auto", "light", "dark"];

function showTheme() {
  say($("theme"), `Theme: ${document.documentElement.dataset.theme || "auto"}`);
  mapped = -Infinity;
}

$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme || "auto") + 1) % THEMES.length];
  if (next === "auto") {
    delete root.dataset.theme;
    localStorage.removeItem("dflockd-theme");
  } else {
    root.dataset.theme = next;
    localStorage.setItem("dflockd-theme", next);
  }
  showTheme();
});

function remember() {
  const query = new URLSearchParams();
  if ($("search").value) query.set("search", $("search").value);
  if ($("sort").value !== "waiters") query.set("sort", $("sort").value);
  history.replaceState(null, "", query.size ? `#${query}` : location.pathname);
}

let typed = 0;

$("search").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => {
    state.limit = STEP;
    state.offset = 0;
    remember();
    clear();
    refresh();
  }, 150);
});

// Keys that do not match any more have not ended.
function clear() {
  for (const row of state.rows.values()) remove(row);
  state.rows.clear();
  state.fresh = true;
}

$("sort").addEventListener("change", () => {
  state.offset = 0;
  remember();
  clear();
  refresh();
});
$("tools").addEventListener("submit", (event) => event.preventDefault());
$("more").addEventListener("click", () => {
  state.limit = Math.min(MOST, state.limit + STEP);
  refresh();
});
$("previous").addEventListener("click", () => turnTo(state.offset - MOST));
$("next").addEventListener("click", () => turnTo(state.offset + MOST));
$("all").addEventListener("change", () => {
  state.offset = 0;
  clear();
  refresh();
});
$("help").addEventListener("click", () => $("keyboard").showModal());
$("keys-close").addEventListener("click", () => $("keyboard").close());
$("keep").addEventListener("click", () => $("confirm").close());
$("release").addEventListener("click", release);
$("pause-yes").addEventListener("click", pauseKey);
$("pause-no").addEventListener("click", () => $("pausing").close());

document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input, select, dialog");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !field) {
    event.preventDefault();
    $("search").focus();
  } else if (event.key === "?" && !field) {
    $("keyboard").showModal();
  } else if (event.key === "s" && !field) {
    const choices = $("sort").options;
    $("sort").selectedIndex = ($("sort").selectedIndex + 1) % choices.length;
    $("sort").dispatchEvent(new Event("change"));
  } else if (event.key === "n" && !field && !$("next").hidden) {
    turnTo(state.offset + MOST);
  } else if (event.key === "p" && !field && !$("previous").hidden) {
    turnTo(state.offset - MOST);
  } else if (event.key === "Escape" && !field) {
    const line = event.target.closest("tr.detail")?.previousElementSibling || event.target.closest("tr");
    const opened = line?.querySelector('[aria-expanded="true"]');
    opened?.focus();
    opened?.click();
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && event.target.matches("#search, .toggle")) {
    const toggles = [...document.querySelectorAll(".toggle")];
    const at = toggles.indexOf(event.target);
    const next = toggles[at + (event.key === "ArrowDown" ? 1 : -1)];
    if (next) {
      event.preventDefault();
      next.focus();
    } else if (event.key === "ArrowUp") {
      $("search").focus();
    }
  }
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});

setInterval(() => {
  if (document.hidden) return;
  const now = performance.now();
  for (const row of state.rows.values()) tick(row, now);
}, 500);

const kept = new URLSearchParams(location.hash.slice(1));
$("search").value = kept.get("search") || "";
if (["waiters", "wait", "age", "key"].includes(kept.get("sort"))) $("sort").value = kept.get("sort");
showTheme();
refresh();
