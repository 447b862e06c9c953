(() => {
  const rows = JSON.parse(document.getElementById('explored').textContent);
  const form = document.querySelector('.explorer'), shown = document.querySelector('.explored');
  const {attack, defense, strength} = form.elements;
  const figure = (title, row) => `<figure><img src="${row.seen}" ` +
    `alt="What an attacker sees who ${title}."><figcaption>${title}<br>${row.verdict}, ` +
    `${row.psnr} dB</figcaption></figure>`;
  const draw = () => {
    const of = rows.filter(row => row.attack === attack.value && row.defense === defense.value);
    const strengths = [...new Set(of.map(row => row.strength))];
    strength.max = strengths.length - 1;
    const chosen = strengths[Math.min(strength.value, strength.max)];
    form.querySelector('output').textContent = chosen;
    shown.innerHTML = of.filter(row => row.strength === chosen).map(row =>
      `<div class="trial"><figure><img src="${row.private}" alt="The private image."><figcaption>private</figcaption></figure>` +
      figure('ignores the defense', row.ignores) + figure('knows the defense', row.knows) + '</div>').join('');
  };
  strength.max = 6;
  strength.value = 4;
  form.addEventListener('input', draw);
  draw();
})();
