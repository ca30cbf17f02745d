// Runs before the page is painted, so that it never flashes in the wrong colours.
const stored = localStorage.getItem("arpc-theme");
if (stored === "dark" || stored === "light") document.documentElement.dataset.theme = stored;
