const { message, origins } = document.querySelector("main").dataset;
document.querySelector("#alone").hidden = !message || Boolean(window.opener);
if (message && window.opener) {
  // The browser delivers each only if the opener is still of that origin.
  for (const origin of JSON.parse(origins)) window.opener.postMessage(JSON.parse(message), origin);
  // Messages of a window that has closed have no source, and viewers compare it.
  setTimeout(() => window.close(), 1000);
}
