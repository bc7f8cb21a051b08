/**
 * Makes and changes elements. Every text goes through `textContent`, so that nothing of a request, a model's name or
 * an error can become markup. The page has no other way to make elements.
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an element. Attributes that are null or false are left out.
 * @param {string} tag
 * @param {Record<string, any>} [attributes] also `text`, and `on`: a map of events to functions
 * @param {...(Node | string | null)} children
 * @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Make an element of SVG. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** Return the element with an id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no element #${id}`);
  return /** @type {any} */ (found);
}

/** Set the text of an element if it is another one, so that an unchanged page is not laid out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show or hide an element. */
export function show(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}

/**
 * Make the children of an element equal to a list of things, and keep elements of things that stay.
 * @template T
 * @param {Element} parent
 * @param {T[]} things
 * @param {(thing: T) => string} keyOf
 * @param {(thing: T) => any} make makes the element of a new thing
 * @param {(element: any, thing: T) => void} update writes a thing's values into its element
 */
export function keep(parent, things, keyOf, make, update) {
  const before = new Map([...parent.children].map((child) => [/** @type {any} */ (child).key, child]));
  let place = parent.firstElementChild;
  for (const thing of things) {
    const key = keyOf(thing);
    let element = before.get(key);
    if (element === undefined) {
      element = make(thing);
      /** @type {any} */ (element).key = key;
    }
    before.delete(key);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, thing);
  }
  for (const gone of before.values()) gone.remove();
}
