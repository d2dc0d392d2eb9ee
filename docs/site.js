// The web site's search takes a word after a hyphen for one that pages must not have: search for flags by their names.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const query = message && message.type === 2 && typeof message.data === "string";
  return post.call(this, query ? { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") } : message, ...rest);
};
