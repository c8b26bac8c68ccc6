(() => {
  const area = document.getElementById("live");
  if (!area) return;
  // Elements stay the same elements, so that focus, selection and scrolling do: new content is worked into them.
  const morph = (old, fresh) => {
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh.cloneNode(true));
    if (old.nodeType !== 1) { if (old.data !== fresh.data) old.data = fresh.data; return; }
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !(name === "open")) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    const keys = new Set([...fresh.children].map((child) => child.id).filter(Boolean));
    for (const child of [...old.children]) if (child.id && !keys.has(child.id)) child.remove();
    let at = old.firstChild;
    for (const child of fresh.childNodes) {
      const same = child.id ? [...old.children].find((one) => one.id === child.id) : at && !at.id ? at : null;
      if (!same) { old.insertBefore(child.cloneNode(true), at); continue; }
      if (same !== at) old.insertBefore(same, at);
      at = same.nextSibling;
      morph(same, child);
    }
    while (at) { const next = at.nextSibling; at.remove(); at = next; }
  };
  const look = async () => {
    let seconds = 5;
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, { redirect: "manual" });
        if (answer.type === "opaqueredirect") return location.reload();
        if (!answer.ok) throw new Error(answer.status);
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = page.getElementById("live");
        if (fresh) { morph(area, fresh); seconds = fresh.dataset.busy ? 1 : 5; }
        if (fresh && fresh.dataset.settled) return;
      } catch { seconds = 10; }
    }
    setTimeout(look, seconds * 1000);
  };
  setTimeout(look, 1000);
})();
