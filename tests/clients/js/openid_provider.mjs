// An OpenID provider with device codes, for one client: node openid_provider.mjs PORT ID SECRET
import Provider from "oidc-provider";

const [port, client_id, client_secret] = process.argv.slice(2);
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [
    {
      client_id,
      client_secret,
      grant_types: ["urn:ietf:params:oauth:grant-type:device_code"],
      redirect_uris: [],
      response_types: [],
    },
  ],
  claims: { openid: ["sub", "groups"] },
  features: { deviceFlow: { enabled: true }, devInteractions: { enabled: true } },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, groups: ["lab"] }) }),
});
provider.listen(Number(port), "127.0.0.1");
