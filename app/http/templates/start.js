
setInterval(async () => {
  if (document.hidden) return;
  try {
    const answer = await fetch("?figures", { headers: { accept: "text/html" } });
    if (answer.ok) document.getElementById("figures").innerHTML = await answer.text();
  } catch { /* the next one may succeed */ }
}, 5000);
