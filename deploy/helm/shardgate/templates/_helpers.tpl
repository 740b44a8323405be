{{- define "shardgate.name" -}}
{{- if contains "shardgate" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-shardgate" (.Release.Name | trunc 40 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "shardgate.selector" -}}
app.kubernetes.io/name: shardgate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "shardgate.labels" -}}
{{ include "shardgate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "shardgate.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "shardgate.name" .) }}
{{- end }}

{{- define "shardgate.hosts" -}}
{{- $name := include "shardgate.name" . }}
{{- $service := printf "%s.%s" $name .Release.Namespace }}
{{- $hosts := concat .Values.hosts (list $name $service (printf "%s.svc" $service) (printf "%s.svc.%s" $service .Values.balancer.clusterDomain)) }}
{{- $ingress := ternary .Values.ingress.hosts list .Values.ingress.enabled }}
{{- $route := ternary .Values.httpRoute.hostnames list .Values.httpRoute.enabled }}
{{- range concat ($ingress | default list) ($route | default list) }}
{{- $hosts = append $hosts (ternary "*" . (hasPrefix "*." .)) }}
{{- end }}
{{- toJson $hosts }}
{{- end }}

{{- define "shardgate.image" -}}
{{ .Values.image.repository }}
{{- with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "shardgate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "shardgate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "shardgate.nodes" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "shardgate.placement" -}}
{{ include "shardgate.nodes" .root }}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "shardgate.selector" $.root | nindent 8 }}
        app.kubernetes.io/component: {{ $.component }}
{{- end }}
{{- end }}

{{- define "shardgate.balancerPort" -}}
{{ ternary 8443 8080 (ne .Values.balancer.tls.secretName "") }}
{{- end }}

{{- define "shardgate.isBehindProxy" -}}
{{ if or .Values.ingress.enabled .Values.httpRoute.enabled }}true{{ end }}
{{- end }}
