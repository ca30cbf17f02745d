// The summary of the group, each second.
import { byId } from "./dom.js";

const WORDS = { live: "live", paused: "paused", lost: "connection lost, trying again", connecting: "connecting" };

export function say(state) {
  byId("live").dataset.state = state;
  if (byId("live-text").textContent !== WORDS[state]) byId("live-text").textContent = WORDS[state];
}

export function listen(show) {
  const feed = new EventSource("api/events");
  feed.onmessage = (event) => show(JSON.parse(event.data));
  feed.onerror = async () => {
    say("lost");
    if (feed.readyState !== EventSource.CLOSED) return; // it tries again by itself
    const answer = await fetch("api/group").catch(() => null);
    if (answer?.status === 401) location.assign("login");
    else setTimeout(() => listen(show), 2000);
  };
}
