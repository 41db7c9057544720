// Makes elements. Text enters the document as text alone: nothing here, nor in the files beside it,
// makes elements of strings.

export const byId = (id) => document.getElementById(id);

// An element. about: `class`, other attributes, and `on`: listeners by event. content: nodes and
// strings; null and false are left out.
export function make(name, about = {}, ...content) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(about)) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value !== null && value !== false) {
      element.setAttribute(key, value === true ? "" : value);
    }
  }
  element.append(...content.filter((part) => part !== null && part !== false));
  return element;
}

// An element of a drawing.
export function shape(name, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
