// Questions to the worker that serves the page.

// The answer as JSON; an error has the worker's own words.
export async function asked(path, parameters = {}, method = "GET") {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
  const response = await fetch(query.size ? `${path}?${query}` : path, { method });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error ?? `the worker answered ${response.status}`);
  return answer;
}
