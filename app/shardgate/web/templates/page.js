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
const fillIn = async (pause) => {
  const pending = document.querySelectorAll("[data-pending]");
  if (!pending.length) return;
  const response = await fetch(location.href, { headers: { accept: "text/html" } }).catch(() => null);
  const text = response && response.ok ? await response.text() : "";
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const row of pending) {
    const found = fresh.querySelector(`[data-name="${CSS.escape(row.dataset.name)}"]`);
    if (!found || "pending" in found.dataset) continue;
    found.hidden = row.hidden;
    row.replaceWith(found);
  }
  setTimeout(fillIn, pause, Math.min(2 * pause, 60_000));
};
setTimeout(fillIn, 1000, 2000);
for (const picture of document.querySelectorAll("img.large")) {
  fetch(picture.src).then(({ headers }) => {
    if (!headers.get("last-modified")) return;
    const mixed = headers.has("x-shardgate-preview") ? ", while chunks were written: of different moments" : "";
    picture.title = `As of ${new Date(headers.get("last-modified")).toLocaleString()}${mixed}`;
  }).catch(() => {});
}
