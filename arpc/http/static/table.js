// A table that can be sorted by any column. The head is made once, so that focus stays where it is.
import { html } from "./dom.js";

const MOST_ROWS = 250; // each second anew: a group of hundreds has many thousands of pairs

export class Table {
  // columns: {key, title, about?, value: row => number | string, cell?: row => string | Node, text?: bool, wide?: bool}
  constructor(element, columns, { sort, descending = true, empty, onRow } = {}) {
    this.element = element;
    this.empty = empty;
    this.onRow = onRow;
    this.body = html("tbody");
    this.setColumns(columns, sort, descending);
  }

  setColumns(columns, sort, descending = true) {
    this.columns = columns;
    this.sort = sort ?? columns[0].key;
    this.descending = descending;
    this.heads = columns.map((column) =>
      html("th", { scope: "col", class: column.text ? "text" : null },
        html("button", { type: "button", title: column.about ?? null, onclick: () => this.sortBy(column) }, column.title)));
    this.element.replaceChildren(html("thead", {}, html("tr", {}, ...this.heads)), this.body);
    this.markSorted();
    if (this.rows) this.render(this.rows);
  }

  sortBy(column) {
    this.descending = this.sort === column.key ? !this.descending : !column.text;
    this.sort = column.key;
    this.markSorted();
    this.render(this.rows ?? []);
  }

  markSorted() {
    this.columns.forEach((column, index) => {
      const direction = this.descending ? "descending" : "ascending";
      this.heads[index].setAttribute("aria-sort", column.key === this.sort ? direction : "none");
    });
  }

  render(rows) {
    this.rows = rows;
    const column = this.columns.find((one) => one.key === this.sort) ?? this.columns[0];
    const sign = this.descending ? -1 : 1;
    const compare = (a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (x == null || y == null) return (x == null) - (y == null);
      return sign * (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y);
    };
    const sorted = [...rows].sort(compare);
    if (!sorted.length) {
      this.body.replaceChildren(html("tr", {}, html("td", { class: "empty", colspan: this.columns.length }, this.empty ?? "nothing")));
      return;
    }
    const more = sorted.length - MOST_ROWS;
    const note = more > 0 ? [html("tr", {}, html("td", { class: "empty", colspan: this.columns.length }, `and ${more} more: sort or filter to see them`))] : [];
    this.body.replaceChildren(...sorted.slice(0, MOST_ROWS).map((row) => this.row(row)), ...note);
  }

  row(row) {
    const cells = this.columns.map((column, index) => {
      const shown = column.cell ? column.cell(row) : column.value(row);
      const kind = [column.text ? "text" : "", column.tone?.(row) ?? ""].join(" ").trim();
      return html(index ? "td" : "th", { class: kind || null, scope: index ? null : "row" }, shown);
    });
    const state = this.onRow?.(row) ?? {};
    return html("tr", state, ...cells);
  }
}
