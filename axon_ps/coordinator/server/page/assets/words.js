// Numbers as people read them.

export function number(value) {
  if (value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} B`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e5) return `${Math.round(value / 1e3)} k`;
  return Number.isInteger(value) ? `${value}` : `${Number(value.toPrecision(4))}`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let n = 0;
  while (value >= 1000 && n < units.length - 1) { value /= 1000; n++; }
  return `${Number(value.toPrecision(3))} ${units[n]}`;
}

export function seconds(value) {
  if (value < 0.0995) return `${Math.round(1000 * value)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export const ago = (value) => (value < 1 ? "now" : `${seconds(value)} ago`);
