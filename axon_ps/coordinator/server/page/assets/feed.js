// The feed: opens it, opens it again when it breaks, and merges its events into one model of the job.

const MAX = { steps: 240, events: 400, points: 1024, records: 300 };

export const model = { began: 0, at: 0, history: "", status: {}, membership: {}, steps: [], events: [], curves: new Map(), loads: new Map() };

export const key = (role, rank) => `${role}/${rank}`;

function merge(event) {
  if (event.begins || event.history !== model.history) {
    Object.assign(model, { steps: [], events: [], curves: new Map(), loads: new Map(), history: event.history });
  }
  model.began = event.began_s;
  model.at = event.at_s ?? 0;
  model.status = event.status;
  if (event.status.membership) model.membership = event.status.membership;
  model.steps = [...model.steps, ...(event.steps ?? [])].slice(-MAX.steps);
  const happened = new Map(model.events.map((e) => [e.number, e]));
  for (const e of event.events ?? []) {
    happened.delete(e.number); // an event that has happened again is the newest
    happened.set(e.number, e);
  }
  model.events = [...happened.values()].slice(-MAX.events);
  for (const { name, at_s = [], value = [] } of event.curves ?? []) {
    const curve = model.curves.get(name) ?? [[], []];
    curve[0].push(...at_s);
    curve[1].push(...value);
    if (curve[0].length > MAX.points) { // each two neighbours become one
      for (const i of [0, 1]) curve[i] = curve[i].filter((_, n) => n % 2 || n > MAX.points - 128);
    }
    model.curves.set(name, curve);
  }
  for (const load of event.members ?? []) {
    const place = key(load.role, load.rank ?? 0);
    model.loads.set(place, { metrics: model.loads.get(place)?.metrics, ...load });
  }
}

export const token = {
  get: () => sessionStorage.getItem("axon_ps token") ?? "",
  set: (value) => sessionStorage.setItem("axon_ps token", value),
};

export function ask(path, options = {}) {
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  return fetch(path, { ...options, headers, cache: "no-store" });
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// Follow the job for ever. `on` has: changed(), connection(text, trouble), refused(text, done).
export async function follow(on) {
  for (;;) {
    try {
      const reply = await ask("/api/feed");
      if (reply.status === 401 || reply.status === 403) {
        await new Promise(async (done) => on.refused((await reply.text()).trim(), done));
        continue;
      }
      if (!reply.ok) throw new Error((await reply.text()).trim());
      await read(reply.body.getReader(), on);
      on.connection("the coordinator has ended the connection; asking again", true);
    } catch (error) {
      const gone = error instanceof TypeError ? "the coordinator does not answer; asking again" : error.message;
      on.connection(gone, true);
    }
    await pause(1000);
  }
}

// Follow the job's log for ever; `changed` is called with the newest records. It is asked for only while it can be seen.
export async function followLog(visible, changed) {
  let history = "", after = 0, records = [];
  for (;;) {
    await pause(2000);
    if (document.hidden || !visible()) continue;
    const reply = await ask(`/api/logs?history=${history}&after=${after}`).catch(() => ({ ok: false }));
    if (!reply.ok) continue;
    const page = await reply.json().catch(() => ({}));
    if (page.history !== history) records = [];
    history = page.history ?? "";
    after = page.records?.length ? page.records[page.records.length - 1].number : after;
    if (page.records) changed(records = [...records, ...page.records].slice(-MAX.records));
  }
}

async function read(reader, on) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await Promise.race([reader.read(), pause(6000).then(() => ({ late: true }))]).then((r) => {
      if (r.late) { reader.cancel(); throw new Error("the coordinator is silent; asking again"); }
      return r;
    });
    if (done) return;
    text += decoder.decode(value, { stream: true });
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      merge(JSON.parse(text.slice(6, end)));
      text = text.slice(end + 2);
      on.connection("", false);
      on.changed();
    }
  }
}
