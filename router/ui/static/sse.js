// Parses server-sent events (WHATWG HTML, section 9.2) from text that may be cut anywhere.

export const MAX_EVENT = 1 << 24; // characters of one event

export class EventParser {
  constructor() {
    this.line = []; // pieces of the line that has not ended
    this.data = []; // lines of the event that has not ended
    this.size = 0; // characters of both
    this.cr = false; // the last character was a carriage return
  }

  // Returns the data of each event that `text` completes. Throws RangeError for one that is too long.
  push(text) {
    const rest = this.cr && text.startsWith("\n") ? text.slice(1) : text;
    if (text) this.cr = text.endsWith("\r");
    const pieces = rest.split(/\r\n|\r|\n/);
    const events = [];
    pieces.forEach((piece, i) => {
      if (i) this.end(events);
      if (!piece) return;
      this.line.push(piece);
      this.size += piece.length;
      if (this.size > MAX_EVENT) throw new RangeError("an event of the stream is too long");
    });
    return events;
  }

  end(events) {
    const line = this.line.join("");
    this.line = [];
    if (line.startsWith("data:")) this.data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line) this.size -= line.length; // a comment, or a field that is not needed
    else if (this.data.length) {
      events.push(this.data.join("\n"));
      this.data = [];
      this.size = 0;
    }
  }
}
