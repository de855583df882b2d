// Talks to a chat server with the official AG-UI client. Reads {url, threadId, contents} from
// standard input; writes, per message that was sent, the events and the messages that the
// client then has. The client refuses streams that break the protocol.
import { createRequire } from "node:module";
import { text } from "node:stream/consumers";

const require = createRequire(`${process.env.CHATKEEP_TEST_NODE_MODULES}/`);
const { HttpAgent } = require("@ag-ui/client");

const { url, threadId, contents } = JSON.parse(await text(process.stdin));
const agent = new HttpAgent({ url, threadId });
const turns = [];
for (const [number, content] of contents.entries()) {
  const events = [];
  agent.addMessage({ id: `user-${number}`, role: "user", content });
  let failure = null;
  try {
    await agent.runAgent(
      { runId: `${threadId}-run-${number}` },
      {
        onEvent: ({ event }) => void events.push(event),
        onRunFailed: ({ error }) => {
          failure = String(error?.message ?? error);
        },
      },
    );
  } catch (error) {
    failure = String(error?.message ?? error);
  }
  turns.push({ events, failure, messages: structuredClone(agent.messages) });
}
process.stdout.write(JSON.stringify(turns));
