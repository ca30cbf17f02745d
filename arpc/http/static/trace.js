// Records what all workers do for some seconds, and opens the timeline or saves the file for Perfetto.
import { asked } from "./ask.js";
import { byId, html } from "./dom.js";

async function record() {
  const seconds = byId("trace-seconds").value;
  const isFile = byId("trace-form").value === "json";
  const status = byId("trace-status");
  byId("trace").disabled = true;
  status.replaceChildren(`recording all workers for ${seconds} s…`);
  try {
    if (isFile) {
      const response = await fetch(`api/trace?${new URLSearchParams({ seconds, form: "json" })}`, { method: "POST" });
      if (!response.ok) throw new Error((await response.json()).error);
      const url = URL.createObjectURL(await response.blob());
      const link = html("a", { href: url, download: "arpc-trace.json" }, "arpc-trace.json");
      status.replaceChildren("recorded: ", link, ", for ui.perfetto.dev");
      link.click();
    } else {
      const { path } = await asked("api/trace", { seconds, keep: 1 }, "POST");
      // browsers may keep a page from opening another that long after the click: then there is still the link
      window.open(path, "_blank", "noopener");
      status.replaceChildren("recorded: ", html("a", { href: path, target: "_blank", rel: "noopener" }, "open the timeline"), ", kept for ten minutes");
    }
  } catch (error) {
    status.replaceChildren(html("span", { class: "error" }, `Nothing was recorded: ${error.message}`));
  } finally {
    byId("trace").disabled = false;
  }
}

byId("trace").addEventListener("click", record);
