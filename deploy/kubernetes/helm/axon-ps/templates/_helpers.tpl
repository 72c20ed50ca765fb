{{- define "axon-ps.name" -}}
{{- if eq .Release.Name "axon-ps" }}axon-ps{{ else }}{{ printf "%s-axon-ps" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "axon-ps.labels" -}}
app.kubernetes.io/name: {{ include "axon-ps.name" . }}
{{- end }}

{{- define "axon-ps.secret" -}}
{{- .Values.token.existingSecret | default (include "axon-ps.name" .) }}
{{- end }}

{{/* What every pod has, whatever it runs. */}}
{{- define "axon-ps.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "axon-ps.place" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "axon-ps.envFrom" -}}
- configMapRef:
    name: {{ include "axon-ps.name" . }}
{{- end }}

{{- define "axon-ps.token" -}}
- name: AXON_PS_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "axon-ps.secret" . }}
      key: token
{{- end }}

{{- define "axon-ps.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A probe of `port`, for `service` if given; Kubernetes' own gRPC probes speak no TLS. */}}
{{- define "axon-ps.probe" -}}
exec:
  command: [axon-ps, health, "127.0.0.1:{{ .port }}"{{ with .service }}, --service, {{ . }}{{ end }}]
{{- end }}

{{- define "axon-ps.mounts" -}}
{{- if .Values.checkpoints.claim.enabled }}
- name: checkpoints
  mountPath: /checkpoints
{{- end }}
- name: tmp
  mountPath: /tmp
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "axon-ps.volumes" -}}
{{- if .Values.checkpoints.claim.enabled }}
- name: checkpoints
  persistentVolumeClaim:
    claimName: {{ .Values.checkpoints.claim.existing | default (printf "%s-checkpoints" (include "axon-ps.name" .)) }}
{{- end }}
- name: tmp
  emptyDir: {}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ .Values.tls.secret }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* The pods of workers: `name` is the container's, `program` false where a TrainJob has it. */}}
{{- define "axon-ps.workerPod" -}}
{{- $ := .root -}}
metadata:
  labels:
    {{- include "axon-ps.labels" $ | nindent 4 }}
    app.kubernetes.io/component: worker
spec:
  {{- include "axon-ps.pod" $ | nindent 2 }}
  {{- include "axon-ps.place" $.Values.workers | nindent 2 }}
  restartPolicy: OnFailure
  terminationGracePeriodSeconds: 30
  containers:
    - name: {{ .name }}
      image: {{ $.Values.image.prefix }}axon-ps-worker:{{ $.Values.workers.tag | default $.Values.image.tag }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      args:
        {{- include "axon-ps.program" $ | nindent 8 }}
      envFrom:
        {{- include "axon-ps.envFrom" $ | nindent 8 }}
      env:
        {{- include "axon-ps.token" $ | nindent 8 }}
        - name: AXON_PS_NODE
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        {{- with $.Values.workers.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- $resources := deepCopy $.Values.workers.resources }}
      {{- if $.Values.workers.gpus }}
      {{- $limits := merge (dict "nvidia.com/gpu" $.Values.workers.gpus) ($resources.limits | default dict) }}
      {{- $_ := set $resources "limits" $limits }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "axon-ps.confined" $ | nindent 8 }}
      volumeMounts:
        {{- include "axon-ps.mounts" $ | nindent 8 }}
        - name: kernels
          mountPath: /var/cache/axon-ps
        - name: shm
          mountPath: /dev/shm
  volumes:
    {{- include "axon-ps.volumes" $ | nindent 4 }}
    - name: kernels
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $.Values.workers.sharedMemory }}
{{- end }}

{{- define "axon-ps.program" -}}
- --nnodes=$(WORKERS)
- --nproc-per-node={{ .Values.workers.processes }}
- --connect-timeout-s=600
{{- range .Values.workers.program }}
- {{ . | quote }}
{{- end }}
{{- end }}
