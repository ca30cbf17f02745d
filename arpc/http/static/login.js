// Says that the last try was wrong; the rest of the page works without scripts.
if (new URLSearchParams(location.search).has("wrong")) {
  const note = document.getElementById("wrong");
  note.hidden = false;
  document.getElementById("secret").setAttribute("aria-describedby", "wrong");
}
