for (const filter of document.querySelectorAll("input[type=search]")) {
  filter.hidden = false;
  const rows = [...document.querySelectorAll("[data-name]")];
  const count = document.querySelector("[role=status]");
  filter.addEventListener("input", () => {
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
