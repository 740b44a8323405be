for (const filter of document.querySelectorAll("input[type=search]")) {
  filter.hidden = false;
  const count = document.querySelector("[role=status]");
  filter.addEventListener("input", () => {
    const rows = [...document.querySelectorAll("[data-name]")];
    const wanted = filter.value.toLowerCase();
    for (const row of rows) row.hidden = !row.dataset.name.toLowerCase().includes(wanted);
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = wanted ? `${shown} of ${rows.length}` : rows.length;
  });
}
for (const button of document.querySelectorAll("button.copy")) {
  if (!navigator.clipboard) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
for (const button of document.querySelectorAll("button[data-post]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const response = await fetch(button.dataset.post, { method: "POST" });
    if (response.ok) location.reload();
    else button.after(` ${(await response.json()).detail}`);
  });
}
for (const button of document.querySelectorAll("button[data-mint]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const { mint, dataset } = button.dataset;
    const headers = { "content-type": "application/json" };
    const response = await fetch(mint, { method: "POST", headers, body: JSON.stringify({ dataset }) });
    const made = await response.json();
    const shown = document.querySelector("#made");
    shown.querySelector("code").textContent = response.ok ? location.origin + made.paths[dataset] : made.detail;
    shown.hidden = false;
  });
}
const showRow = ({ name, html }) => {
  const row = document.querySelector(`[data-pending][data-name="${CSS.escape(name)}"]`);
  if (!row) return;
  const made = document.createElement("template");
  made.innerHTML = html;
  made.content.firstElementChild.hidden = row.hidden;
  row.replaceWith(made.content);
};
const fillIn = async (pause) => {
  if (!document.querySelector("[data-pending]")) return;
  try {
    const { body } = await fetch("?rows", { headers: { accept: "text/html" } });
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (text + part.value).split("\n");
      text = lines.pop();
      for (const line of lines) showRow(JSON.parse(line));
    }
  } catch (lost) {
    console.warn(lost);
  }
  setTimeout(fillIn, pause, Math.min(2 * pause, 60_000));
};
fillIn(1000);
// A picture that is not drawn yet is answered with 503.
const reload = (picture) => {
  const pause = Number(picture.dataset.pause || 1000);
  if (pause > 60_000) return;
  picture.dataset.pause = 2 * pause;
  setTimeout(() => { picture.src = picture.src; }, pause);
};
document.addEventListener("error", ({ target }) => { if (target.matches("img")) reload(target); }, true);
for (const picture of document.images) if (picture.complete && !picture.naturalWidth) reload(picture);
const describe = async (picture) => {
  const url = picture.src;
  const response = await fetch(url);
  const { headers } = response;
  if (!response.ok || picture.src !== url) return;
  const modified = headers.get("last-modified");
  const mixed = headers.has("x-shardgate-preview") ? ", while chunks were written: of different moments" : "";
  if (modified) picture.title = `As of ${new Date(modified).toLocaleString()}${mixed}`;
  if (headers.get("content-type").startsWith("image/svg")) {
    [, picture.alt] = (await response.text()).match("<title>([^<]*)");
  }
  const more = new URL(url);
  const times = Number(more.searchParams.get("again")) + 1;
  more.searchParams.delete("again");
  const isPartial = headers.has("x-shardgate-grid");
  const isWhole = !more.pathname.endsWith("/grid.svg") || picture.dataset.whole === more.href;
  if (times > 60 || (isWhole && !isPartial)) return;
  // The picture was loaded before this answer, and may lack what became known between the two.
  if (!isPartial) picture.dataset.whole = more.href;
  more.searchParams.set("again", times);  // of the same address the browser would show the same
  setTimeout(() => { if (picture.src === url) picture.src = more; }, isPartial ? 1000 : 0);
};
const planes = document.querySelectorAll("img.plane");
for (const picture of planes) {
  const loaded = () => {
    picture.classList.remove("loading");
    describe(picture).catch(() => {});
  };
  picture.addEventListener("load", loaded);
  if (picture.complete && picture.naturalWidth) loaded();
}
for (const form of document.querySelectorAll("form.sliders")) {
  let timer = 0;
  const show = () => {
    const chosen = [...new FormData(form)].filter(([, value]) => value);
    history.replaceState(null, "", chosen.length ? `?${new URLSearchParams(chosen)}` : location.pathname);
    for (const picture of planes) {
      const url = new URL(picture.src);
      const path = url.searchParams.get("path");
      url.search = new URLSearchParams([["path", path], ...chosen]);
      delete picture.dataset.pause;
      picture.classList.add("loading");
      picture.src = url;
    }
  };
  form.querySelector("button").hidden = true;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (target.nextElementSibling) target.nextElementSibling.textContent = target.value;
    clearTimeout(timer);
    timer = setTimeout(show, 150);  // a slider that moves says so often
  });
}
