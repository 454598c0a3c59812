// Unfold everything for printing: browsers without ::details-content print only what is open.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach(each => { each.open = true });
});
addEventListener("afterprint", () => { folded.forEach(each => { each.open = false }) });
