for (const tool of document.querySelectorAll('.sorts, .finds')) tool.hidden = false;
document.querySelector('.finds').addEventListener('input', event => {
  const wanted = event.target.value.toLowerCase();
  for (const body of document.querySelectorAll('.board tbody')) {
    body.hidden = !body.textContent.toLowerCase().includes(wanted);
  }
});
for (const heading of document.querySelectorAll('th[data-sort]')) {
  const button = document.createElement('button');
  button.type = 'button';
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener('click', () => {
    const table = heading.closest('table'), column = heading.cellIndex;
    const down = heading.getAttribute('aria-sort') === 'ascending';
    const value = body => body.rows[0].cells[column].dataset.value;
    const compare = (a, b) => heading.dataset.sort === 'text' ? a.localeCompare(b) : a - b;
    const bodies = [...table.tBodies].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === '' || y === '') return (x === '') - (y === '');  // what is unknown stays last
      return down ? compare(y, x) : compare(x, y);
    });
    for (const other of table.querySelectorAll('th[aria-sort]')) other.removeAttribute('aria-sort');
    heading.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    table.append(...bodies);
  });
}
